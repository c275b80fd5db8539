"""The model's own rotary module, forwards and backwards: keys before the embedding, and keys put back into it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pariskv.errors import ModelError

TOLERANCE = 1e-2
"""Relative error of rotating back and forth that bfloat16 keys may show."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of embedding whose angles depend on the longest position they are asked for, so a part of a row has others."""


def rotary_of(model: PreTrainedModel) -> ModelRotary | None:
    """The model's rotary embedding, None for a model without one that we know how to undo."""
    attention = next((m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")), None)
    rotary = next((m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")), None)
    if attention is None or rotary is None:
        return None
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    # One embedding per kind of layer (Gemma-3) takes a third argument; we do not undo those.
    if apply is None or len(inspect.signature(rotary.forward).parameters) != 2:
        return None
    if getattr(rotary, "rope_type", None) in LENGTH_DEPENDENT:
        return None
    return ModelRotary(rotary, apply)


class ModelRotary:
    """A `pariskv.types.Rotary` by the model's module and the function that applies its cosines and sines.

    module  (keys, positions [R, n]) -> cosines and sines [R, n, D], with the attribute attention_scaling
    apply   (queries, keys [R, h, n, D], cosines, sines) -> both embedded
    """

    def __init__(self, module: Any, apply: Callable[..., Any]):
        self.module, self.apply = module, apply

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._turned(keys, *self.module(keys, positions))

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Raises ModelError where turning back and forth does not give the keys."""
        cosines, sines = self.module(keys, positions)
        squared = float(self.module.attention_scaling) ** 2
        plain = self._turned(keys, cosines / squared, -sines / squared)
        _refuse_one_way(keys, self._turned(plain, cosines, sines))
        return plain

    def _turned(self, keys: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        turned: Tensor = self.apply(keys, keys, cosines, sines)[1]
        return turned


def _refuse_one_way(keys: Tensor, again: Tensor) -> None:
    error = (keys - again).norm() / keys.norm().clamp(min=torch.finfo(torch.float32).tiny)
    if float(error) > TOLERANCE:
        raise ModelError(
            f"the model's rotary embedding cannot be undone (relative error {float(error):.1e}); "
            f"retrievers that need keys before RoPE do not work with this model"
        )
