"""A configuration's model without its weights: sizes by the model's own configuration, on torch's device "meta"."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from pariskv.binding import bind
from pariskv.cache import window_of
from pariskv.config import Config
from pariskv.errors import ModelError
from pariskv.integrations import hub
from pariskv.integrations.activations import meta_model, traced, weight_bytes
from pariskv.integrations.geometry import Geometry, supported_layers
from pariskv.integrations.models import DTYPES, ModelSource, quiet_transformers, require_gguf, resolve_model
from pariskv.plan import Described
from pariskv.planner import Planner

if TYPE_CHECKING:
    from pariskv.registry import Registry


def describe_model(config: Config, device: torch.device, registry: Registry | None = None) -> Described:
    """The planner of a configuration's model as it would be on a device; see `pariskv.plan.describe`."""
    sizes = model_sizes(config.model.name, config.model.trust_remote_code)
    model = meta_model(sizes, dtype_on(device, config.model.dtype, sizes))
    return described(model, config, device, registry)


def described(
    model: PreTrainedModel, config: Config, device: torch.device, registry: Registry | None = None
) -> Described:
    """The same of a model on the device "meta"."""
    from pariskv.registry import Registry

    layer_types, _ = supported_layers(model)
    text = model.config.get_text_config(decoder=True)
    retrieving = [index for index, kind in enumerate(layer_types) if kind == "full_attention"]
    bound = bind(config, len(layer_types), registry or Registry.load(), retrieving)
    pipelines = {index: pipeline.plain for index, pipeline in bound.items()}
    windows = {index: window_of(pipeline, config.window, index) for index, pipeline in pipelines.items()}
    geometry = Geometry(model, text)
    geometry.device = device
    planner = Planner(config, geometry.expected_info, pipelines, windows, device, lambda: traced(model))
    context = None if config.model.allow_beyond_context else getattr(text, "max_position_embeddings", None)
    new = config.generation.max_new_tokens
    return Described(planner, weight_bytes(model), context, new, step_weights(model), prompt_weights(model))


def step_weights(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads at least.

    Of an embedding it reads a row for each token, which is not counted, unless the embedding gives the logits, too; of
    experts it reads those that one token takes; of a model for images and text it reads the decoder.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    read = {id(weight): Fraction(weight.nbytes) for weight in (head.parameters() if head is not None else ())}
    read |= {id(weight): weight.nbytes * share for _, weight, share in _decoder_weights(model)}
    return math.floor(sum(read.values()))


def prompt_weights(model: PreTrainedModel) -> int:
    """Numbers of the matrices that every token of a prompt is multiplied by at least.

    They are the decoder's, of experts those that one token takes; only the last token needs what gives the logits.
    """
    matrices = (
        weight.numel() * share
        for name, weight, share in _decoder_weights(model)
        if weight.dim() > 1 and not name.endswith("bias")
    )
    return math.floor(sum(matrices))


def _decoder_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, Fraction]]:
    """The decoder's weights without embeddings, by name, and the share of each that one token takes."""
    untyped: Any = model
    decoder = untyped.get_decoder()
    looked_up = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    text = model.config.get_text_config(decoder=True)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    taken = Fraction(getattr(text, "num_experts_per_tok", None) or experts, experts)
    for name, weight in decoder.named_parameters():
        if id(weight) not in looked_up:
            yield name, weight, taken if ".experts." in name else Fraction(1)


def dtype_on(device: torch.device, wanted: str, sizes: PreTrainedConfig) -> torch.dtype:
    """The weights' type, as `load_model` chooses it: auto is float32 on a CPU, else the checkpoint's."""
    if wanted != "auto":
        found: Any = getattr(torch, DTYPES[wanted])
    elif device.type == "cpu":
        found = torch.float32
    else:
        found = getattr(sizes, "dtype", None) or getattr(sizes.get_text_config(decoder=True), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found)
    return found if isinstance(found, torch.dtype) else torch.float32


def model_sizes(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the model `name`; of a model on the hub that is not here, only that file is downloaded.

    Raises ModelError, one line, where there is none or it cannot be read.
    """
    source = resolve_model(name)
    path = source.path or _config_file(source).parent
    try:
        with quiet_transformers():
            return _read(path, trust_remote_code)
    except Exception as error:  # whatever transformers raises on files it cannot use
        raise ModelError(f"model {name!r}: cannot read the configuration in {path}: {hub.one_line(error)}") from error


def _read(path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    if path.suffix == ".gguf":
        require_gguf(str(path))
        path, options["gguf_file"] = path.parent, path.name
    found: PreTrainedConfig = AutoConfig.from_pretrained(path, **options)
    return found


def _config_file(source: ModelSource) -> Path:
    """The config.json of a model on the hub, from its cache on this machine or downloaded."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(source.hub_id, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(source.hub_id, "config.json", etag_timeout=hub.TIMEOUT))
    except Exception as error:  # the hub's client lets the errors of its HTTP library through
        raise ModelError(
            f"model {source.name!r}: its config.json is not on this machine, and the hub cannot serve it "
            f"({hub.one_line(error)}); check the name and the network, or give a folder that holds config.json"
        ) from error
