"""The vote: how strongly each key's sign patterns collide with the query's."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.collide import naive
from pariskv_kernels.collide.naive import Votes
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.tiers import MAX_WEIGHT

__all__ = ["Votes", "collide"]


def collide(signs: Tensor, table: Tensor, lengths: Tensor, max_weight: int = MAX_WEIGHT) -> Votes:
    """Weighted votes of each key, and how many keys have each number of votes.

    signs       [B, H, S, N]    uint8, one bit-packed sign pattern per subspace
    table       [B, H, S, 2^m]  uint8, weight 0 to max_weight of each pattern for this query
    lengths     [B]             int32, valid keys of each row

    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.2; `naive.py` is the definition.
    """
    check_dtype("signs", signs, torch.uint8)
    check_shape("signs", signs, None, None, None, None)
    check_dtype("table", table, torch.uint8)
    check_shape("table", table, *signs.shape[:3], None)
    check_shape("lengths", lengths, signs.shape[0])
    if is_compiled_for(signs, table, lengths):
        from pariskv_kernels.collide import cpu

        return cpu.collide(signs, table, lengths, max_weight)
    if is_on_gpu(signs, table, lengths):
        from pariskv_kernels.collide import cuda

        return cuda.collide(signs, table, lengths, max_weight)
    return naive.collide(signs, table, lengths, max_weight)
