"""The query's vote for every sign pattern, by its inner product with the pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape, check_subspace_dim
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.linear import naive
from pariskv_kernels.linear.naive import MAX_WEIGHT

__all__ = ["MAX_WEIGHT", "linear_table"]


def linear_table(rotated: Tensor, subspace_dim: int) -> Tensor:
    """Weight 0 to MAX_WEIGHT of every sign pattern of every subspace, MAX_WEIGHT / 2 for an inner product of 0.

    rotated       [B, H, P]  float32, the query in the keys' frame, of any length
    subspace_dim  m, 4 or 8; S = P / m
    returns       [B, H, S, 2^m]  uint8

    One scale serves all subspaces of a head: the largest inner product of any pattern has MAX_WEIGHT. So the sum of a
    key's weights is its estimated inner product up to a factor and an offset, with rounding.

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_dtype("rotated", rotated, torch.float32)
    check_shape("rotated", rotated, None, None, None)
    check_subspace_dim(subspace_dim)
    if rotated.shape[2] % subspace_dim:
        raise ValueError(f"rotated: wanted a multiple of {subspace_dim} coordinates, got {rotated.shape[2]}")
    if is_compiled_for(rotated):
        from pariskv_kernels.linear import cpu

        return cpu.linear_table(rotated, subspace_dim)
    if is_on_gpu(rotated):
        from pariskv_kernels.linear import cuda

        return cuda.linear_table(rotated, subspace_dim)
    return naive.linear_table(rotated, subspace_dim)
