"""The definition of `gather_rows`."""

from __future__ import annotations

import torch
from torch import Tensor


def row_numbers(indices: Tensor, num_rows: int) -> Tensor:
    """Where the rows lie once [B, H, N] is one axis: int64 [B * H * K]. An empty slot, -1, is row 0 of its head."""
    batch, heads, _ = indices.shape
    starts = torch.arange(0, batch * heads * num_rows, max(num_rows, 1), device=indices.device)
    return (indices.clamp(min=0) + starts.view(batch, heads, 1)).flatten()


def gather_rows(rows: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Copy the rows; zero where empty, so that not even a NaN of row 0 gets through."""
    valid = indices >= 0
    taken = rows.flatten(0, 2).index_select(0, row_numbers(indices, rows.shape[2])).view(out.shape)
    out.copy_(taken.masked_fill_(~valid[..., None, None], 0))
    return valid
