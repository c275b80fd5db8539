"""The definition of `append_token`."""

from __future__ import annotations

import torch
from torch import Tensor


def append_token(
    keys: Tensor, values: Tensor, rows: Tensor, steady: Tensor, length: Tensor, active: Tensor, sink: int
) -> None:
    """A token's slot is its position in the sink, and behind it its position modulo the ring."""
    ring = steady.shape[1] - sink
    slots = torch.where(length < sink, length, (length - sink).remainder(ring) + sink)
    where = torch.arange(len(length), device=length.device), slots
    rows.permute(0, 2, 1, 3, 4)[where] = torch.stack((keys[:, :, 0], values[:, :, 0]), dim=2)
    steady[where] = active
    length += active
