"""The definitions of `gather_rows` and `gather_changed`."""

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
    out.copy_(rows_at(rows, indices).masked_fill_(~valid[..., None, None], 0))
    return valid


def rows_at(rows: Tensor, indices: Tensor) -> Tensor:
    """The rows [B, H, K, 2, D]; for -1 row 0. Rows are indexed in place: a store's are no contiguous tensor."""
    batch, heads, _ = indices.shape
    b = torch.arange(batch, device=indices.device).view(-1, 1, 1)
    h = torch.arange(heads, device=indices.device).view(1, -1, 1)
    return rows[b, h, indices.clamp(min=0)]


def gather_changed(rows: Tensor, indices: Tensor, held: Tensor, out: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Compare every slot with every entry; the r-th free slot takes the r-th entry that no slot holds."""
    wanted = indices >= 0
    same = (held.unsqueeze(-1) == indices.unsqueeze(-2)) & wanted.unsqueeze(-2)  # [B, H, slot, entry]
    kept, new = same.any(-1), wanted & ~same.any(-2)
    rank = (~kept).cumsum(-1) - 1
    filled = ~kept & (rank < new.sum(-1, keepdim=True))
    newest_first = new.int().argsort(dim=-1, descending=True, stable=True)
    entry = torch.where(kept, same.int().argmax(-1), newest_first.gather(-1, rank.clamp(min=0)))
    valid = kept | filled
    held.copy_(torch.where(valid, indices.gather(-1, entry), -1))
    out.copy_(torch.where(kept[..., None, None], out, rows_at(rows, held).masked_fill_(~valid[..., None, None], 0)))
    counts += torch.stack((kept.sum(), wanted.sum()))
    return valid, torch.where(valid, entry, -1).int()
