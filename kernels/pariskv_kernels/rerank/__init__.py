"""Estimates of the candidates' inner products from their codes."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape, check_subspace_dim
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.rerank import naive

WIDEST = 256
"""Coordinates of the longest query that the lanes of a warp can hold, eight each."""


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Estimates of q . k for the candidates: sum over the blocks of weight x <q_b, sign x level>.

    rotated  [B, H, P]         float32, the rotated query (not normalised, so neither is the estimate)
    codes    [B, H, N, P / 2]  uint8, 4 bits a coordinate as `encode_keys` packs them
    weights  [B, H, N, S]      float16; m = P / S is 4 or 8
    indices  [B, H, C]         int32, -1 where empty
    returns  [B, H, C]         float32, -inf where empty

    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.3 (RSQ); `naive.py` is the definition.
    """
    check_estimates(rotated, codes, weights, indices)
    if is_compiled_for(rotated, codes, weights, indices):
        from pariskv_kernels.rerank import cpu

        return cpu.estimate_scores(rotated, codes, weights, indices)
    if weights.shape[3] % 2 == 0 and is_on_gpu(rotated, codes, weights, indices):
        from pariskv_kernels.rerank import cuda

        return cuda.estimate_scores(rotated, codes, weights, indices)
    return naive.estimate_scores(rotated, codes, weights, indices)


def estimate_scores_by_head(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """`estimate_scores` for every query head of a group.

    rotated  [B, H, G, P]  float32
    returns  [B, H, G, C]  float32, -inf where empty; within rounding what each head gives by itself

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_estimates(rotated, codes, weights, indices, by_head=True)
    if is_compiled_for(rotated, codes, weights, indices):
        from pariskv_kernels.rerank import cpu

        return cpu.estimate_scores_by_head(rotated, codes, weights, indices)
    if runs_on_gpu(rotated, codes, weights, indices):
        from pariskv_kernels.rerank import cuda_group

        return cuda_group.estimate_scores_by_head(rotated, codes, weights, indices)
    return naive.estimate_scores_by_head(rotated, codes, weights, indices)


def runs_on_gpu(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, *others: Tensor) -> bool:
    """The kernel for every head of a group is there and can hold what is asked for."""
    fits = weights.shape[3] % 2 == 0 and rotated.shape[-1] <= WIDEST
    return fits and is_on_gpu(rotated, codes, weights, indices, *others)


def check_estimates(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, by_head: bool = False) -> None:
    """Raise TypeError or ValueError naming the first argument that is not as the functions above want it."""
    check_shape("rotated", rotated, None, None, *([None] if by_head else []), None)
    check_dtype("rotated", rotated, torch.float32)
    batch, heads, padded = *rotated.shape[:2], rotated.shape[-1]
    check_dtype("codes", codes, torch.uint8)
    check_shape("codes", codes, batch, heads, None, padded // 2)
    check_dtype("weights", weights, torch.float16)
    check_shape("weights", weights, batch, heads, codes.shape[2], None)
    check_subspace_dim(padded // max(weights.shape[3], 1))
    check_dtype("indices", indices, torch.int32)
    check_shape("indices", indices, batch, heads, None)
