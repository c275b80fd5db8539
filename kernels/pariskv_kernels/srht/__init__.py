"""The randomised Hadamard rotation that spreads keys and queries evenly over the subspaces."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_float, check_shape
from pariskv_kernels.launch import is_on_gpu
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


def rotate_group_mean(heads: Tensor, seed: int = 42) -> Tensor:
    """The mean of a group's queries, by `rotate` within rounding: for a step's few vectors.

    heads    [B, H, G, D] floating point
    returns  [B, H, P] float32; a row does not depend on how many there are

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("heads", heads)
    check_shape("heads", heads, None, None, None, None)
    padded = padded_dim(heads.shape[-1])
    if heads.dtype != torch.float64 and is_on_gpu(heads):
        from pariskv_kernels.srht import cuda

        return cuda.rotate_group_mean(heads, padded, seed)
    return naive.rotate_group_mean(heads, padded, seed)
