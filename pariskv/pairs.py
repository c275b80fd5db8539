"""Keys and values of the same tokens, and the rows [H, n, 2, D] that hold both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values of the same tokens."""


def split(rows: Tensor) -> Pair:
    """Rows [H, n, 2, D] as keys and values [H, n, D]."""
    return rows[:, :, 0], rows[:, :, 1]


def as_pair(pieces: Iterable[Pair]) -> Pair:
    """Keys and values [H, n, D] of the pieces, one after the other."""
    keys, values = zip(*pieces, strict=True)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """tensor[rows] along the first axis, a view where it can be one; a device does not wait for the numbers."""
    if len(rows) == 1:
        return tensor[rows[0] : rows[0] + 1]
    return tensor if list(rows) == list(range(len(tensor))) else torch.stack([tensor[row] for row in rows])


def as_batch(rows: list[Tensor]) -> Tensor:
    """Rows as one tensor [R, ...]; a single row, a prompt's usual case, is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
