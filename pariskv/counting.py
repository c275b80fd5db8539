"""How many rows the steps have selected, counted on the device: nobody waits for the numbers before a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pariskv.layer import LayerState


def count_selected(layers: Iterable[LayerState]) -> None:
    """Add to the layers' counters what the step selected, in a few operations for all of them together."""
    due = [layer for layer in layers if layer.in_step and not layer.is_counted and layer.chosen is not None]
    if due:
        chosen = _as_integers([layer.chosen for layer in due if layer.chosen is not None])
        counters = [layer.selected[..., : one.shape[-1]] for layer, one in zip(due, chosen, strict=True)]
        torch._foreach_add_(counters, chosen)  # type: ignore[arg-type]  # its stub knows numbers only
    for layer in due:
        layer.is_counted = True


def _as_integers(flags: list[Tensor]) -> Sequence[Tensor]:
    """Flags [B, H, K] as int32: at once where they have one size."""
    if len({flag.shape for flag in flags}) == 1:
        return torch.stack(flags).int().unbind()
    return [flag.int() for flag in flags]
