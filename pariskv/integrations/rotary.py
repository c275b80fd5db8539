"""Keys before the rotary embedding, by the model's own rotary module turned backwards."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pariskv.errors import ModelError
from pariskv.prompt import Unrotate

TOLERANCE = 1e-2
"""Relative error of rotating back and forth that bfloat16 keys may show."""


def make_unrotate(model: PreTrainedModel) -> Unrotate | None:
    """The inverse of the model's rotary embedding, None for a model without one that we know how to undo."""
    attention = next((m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")), None)
    rotary = next((m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")), None)
    if attention is None or rotary is None:
        return None
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    # One embedding per kind of layer (Gemma-3) takes a third argument; we do not undo those.
    if apply is None or len(inspect.signature(rotary.forward).parameters) != 2:
        return None

    def unrotate(layer: int, keys: Tensor, start: int) -> Tensor:
        rows = keys.unsqueeze(0)
        positions = torch.arange(start, start + keys.shape[1], device=keys.device).unsqueeze(0)
        cos, sin = rotary(rows, positions)
        squared = float(cast(float, rotary.attention_scaling)) ** 2
        plain = _rotate(apply, rows, cos / squared, -sin / squared)
        _refuse_one_way(layer, rows, _rotate(apply, plain, cos, sin))
        return plain[0]

    return unrotate


def _rotate(apply: Callable[..., Any], keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated: Tensor = apply(keys, keys, cos, sin)[1]
    return rotated


def _refuse_one_way(layer: int, keys: Tensor, again: Tensor) -> None:
    error = (keys - again).norm() / keys.norm().clamp(min=torch.finfo(torch.float32).tiny)
    if float(error) > TOLERANCE:
        raise ModelError(
            f"layer {layer}: the model's rotary embedding cannot be undone (relative error {float(error):.1e}); "
            f"retrievers that need keys before RoPE do not work with this model"
        )
