"""What pariskv must know of a transformers model before its first forward, and which models it can serve."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from pariskv.errors import BindingError, ModelError
from pariskv.types import LayerInfo


class Geometry:
    """What a layer's cache must know of its attention module before the first forward."""

    def __init__(self, model: PreTrainedModel, text_config: PreTrainedConfig):
        self.model_name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.text_config, self.dtype, self.device = text_config, model.dtype, model.device
        self.num_heads = int(text_config.num_attention_heads)
        self.modules: dict[int, Any] = {
            cast(int, module.layer_idx): module
            for module in model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "scaling")
        }

    def expected_info(self, index: int, batch: int) -> LayerInfo:
        """The layer's sizes by the model's configuration, before its first keys."""
        module, config = self.modules.get(index), self.text_config
        head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // self.num_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.num_heads
        return self._info(index, batch, kv_heads, head_dim, self.dtype, self.device)

    def layer_info(self, index: int, keys: Tensor) -> LayerInfo:
        """The layer's sizes, from its first keys [B, H, Q, D] and its module."""
        batch, kv_heads, _, head_dim = keys.shape
        return self._info(index, batch, kv_heads, head_dim, keys.dtype, keys.device)

    def _info(
        self, index: int, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerInfo:
        module = self.modules.get(index)
        return LayerInfo(
            index=index,
            batch=batch,
            kv_heads=kv_heads,
            group=self.num_heads // kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            scaling=float(getattr(module, "scaling", head_dim**-0.5)),
            softcap=getattr(module, "attn_logit_softcapping", None),
            model=self.model_name,
        )


def supported_layers(model: PreTrainedModel) -> tuple[list[str], list[dict[str, Any]]]:
    """The kind of every decoder layer and the arguments of its stock cache layer.

    Raises ModelError, with the reason, for a model that pariskv cannot serve.
    """
    name, config = type(model).__name__, model.config
    text_config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; pariskv serves decoder-only models")
    if getattr(text_config, "kv_lora_rank", None):
        raise ModelError(
            f"{name} uses multi-head latent attention (kv_lora_rank={text_config.kv_lora_rank}): its cache holds "
            f"latents, not keys; such a model is not supported"
        )
    if getattr(text_config, "kv_sharing_modes", None) or getattr(text_config, "num_kv_shared_layers", 0):
        raise ModelError(f"{name} shares keys and values between layers; such a model is not supported")
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{name} does not use transformers' AttentionInterface, so its attention cannot be replaced; "
            f"such a model is not supported"
        )
    layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
    unknown = sorted(set(layer_types) - set(DYNAMIC_LAYER_TYPE_MAPPING))
    if unknown:
        raise ModelError(f"{name} has layers of a kind that pariskv does not know: {', '.join(unknown)}")
    if "full_attention" not in layer_types:
        kinds = ", ".join(sorted(set(layer_types)))
        raise ModelError(f"{name} has no full-attention layer to retrieve in, only: {kinds}")
    return layer_types, layer_kwargs


def full_attention_layers(model: PreTrainedModel) -> list[int]:
    """The layers that attend to the whole history; ModelError for a model that pariskv cannot serve."""
    return [index for index, kind in enumerate(supported_layers(model)[0]) if kind == "full_attention"]


def refuse_missing_rotary(pipelines: Any, has_rotary: bool, model: PreTrainedModel) -> None:
    """Raise BindingError where a format needs keys before RoPE and the model cannot give them."""
    for pipeline in pipelines:
        for encoder in pipeline.encoders:
            if "pre_rope" in encoder.needs and not has_rotary:
                raise BindingError(
                    f"layer {pipeline.index}: {encoder.name} needs keys before RoPE, but {type(model).__name__} has "
                    f"no rotary embedding that can be undone; choose another retriever"
                )
