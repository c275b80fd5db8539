"""The definition of `gather_rows`."""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """rows [B, H, N, ...] at indices [B, H, K]: [B, H, K, ...]. An empty slot, -1, reads row 0."""
    batch, heads, num_rows = rows.shape[:3]
    starts = torch.arange(0, batch * heads * num_rows, max(num_rows, 1), device=rows.device)
    flat = indices.clamp(min=0) + starts.view(batch, heads, 1)
    return rows.flatten(0, 2).index_select(0, flat.flatten()).view(*indices.shape, *rows.shape[3:])


def gather_rows(rows: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Copy the rows; zero where empty, so that not even a NaN of row 0 gets through."""
    valid = indices >= 0
    out.copy_(take_rows(rows, indices).masked_fill_(~valid[..., None, None], 0))
    return valid
