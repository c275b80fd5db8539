"""Sums whose result does not depend on how many rows are summed at once."""

from __future__ import annotations

from torch import Tensor


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one axis, of a power-of-two size, by adding its two halves until one entry is left.

    Elementwise additions round alike in every layout. A reduction or a matrix product may add in an
    order that depends on the shape, and a block would not get the same codes in any split.
    """
    size = x.shape[dim]
    if size < 1 or size & (size - 1):
        raise ValueError(f"x: wanted a power of two along dim {dim}, got {size}")
    while x.shape[dim] > 1:
        low, high = x.chunk(2, dim)
        x = low + high
    return x.squeeze(dim)
