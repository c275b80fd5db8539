"""The query's vote for every sign pattern, by its rank among the patterns that keys have."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape, check_subspace_dim
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.tiers import naive

MAX_WEIGHT = naive.MAX_WEIGHT
Shares = naive.Shares
ALL_KEYS: Shares = ((0, 100),)


def tier_table(rotated: Tensor, counts: Tensor, lengths: Tensor, shares: Shares = ALL_KEYS) -> Tensor:
    """Weight 6 to 0 of every sign pattern of every subspace.

    rotated  [B, H, P]        float32, the rotated mean query, of any length
    counts   [B, H, S, 2^m]   int32, keys per pattern; m = 4 or 8, S = P / m
    lengths  [B]              int32 or int64, the keys of each row
    shares                    from which length on, how many percent of them should collide in a subspace,
                              rounded up: the row's target
    returns  [B, H, S, 2^m]   uint8

    Patterns are ranked by inner product with the query's block, equal ones by the lower number. With
    `before` the number of keys in all better patterns, the weight is how many of 5, 15, 30, 50, 75
    and 100 % of the row's target exceed `before` (before x 100 < percent x target, in integers). So the best
    pattern weighs 6 whatever its population, and 0 is for those that start beyond the target.

    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.2; `naive.py` is the definition.
    """
    check_dtype("rotated", rotated, torch.float32)
    check_shape("rotated", rotated, None, None, None)
    batch, heads, padded = rotated.shape
    subspace_dim = counts.shape[-1].bit_length() - 1
    check_subspace_dim(subspace_dim)
    check_shape("counts", counts, batch, heads, padded // subspace_dim, 1 << subspace_dim)
    check_dtype("counts", counts, torch.int32)
    check_shape("lengths", lengths, batch)
    check_dtype("lengths", lengths, torch.int32, torch.int64)
    check_shares(shares)
    if is_compiled_for(rotated, counts, lengths):
        from pariskv_kernels.tiers import cpu

        return cpu.tier_table(rotated, counts, lengths, shares)
    if is_on_gpu(rotated, counts, lengths):
        from pariskv_kernels.tiers import cuda

        return cuda.tier_table(rotated, counts, lengths, shares)
    return naive.tier_table(rotated, counts, lengths, shares)


def check_shares(shares: Shares) -> None:
    starts = [start for start, _ in shares]
    if not shares or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(f"shares: wanted ascending lengths of which the first is 0, got {starts}")
