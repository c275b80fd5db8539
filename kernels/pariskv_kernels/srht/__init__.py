"""The randomised Hadamard rotation that spreads keys and queries evenly over the subspaces."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.srht import naive


def padded_dim(head_dim: int) -> int:
    """P, the next power of two that holds a head: 64 for 64, 128 for 80."""
    return 1 << (head_dim - 1).bit_length()


def rotate(x: Tensor, seed: int = 42) -> Tensor:
    """Rotated vectors, not normalised: rotate(q) . rotate(k) = P (q . k).

    x        [..., D] of any floating-point dtype; the arithmetic is float32, for float64 too
    seed     of the random signs, which are the same on every device
    returns  [..., P] float32, P the next power of two: heads are padded with zeros, which changes
             no inner product. Bit-identical whatever the number of rows. May be a transposed view

    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.1; `naive.py` is the definition.
    """
    check_float("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: wanted vectors of at least one coordinate, got the shape {list(x.shape)}")
    return naive.rotate(x, padded_dim(x.shape[-1]), seed)


def rotate_queries(x: Tensor, seed: int = 42) -> Tensor:
    """`rotate` for a step's few vectors: equal within rounding, in two operations instead of a butterfly.

    x        [B, H, D] float32
    returns  [B, H, P] float32; a row does not depend on how many there are

    Raises TypeError or ValueError naming the argument.
    """
    check_dtype("x", x, torch.float32)
    check_shape("x", x, None, None, None)
    return naive.rotate_few(x.flatten(0, 1), padded_dim(x.shape[-1]), seed).view(*x.shape[:2], -1)
