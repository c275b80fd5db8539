"""The vote: how strongly each key's sign patterns collide with the query's."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.collide import naive
from pariskv_kernels.collide.naive import Votes
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.linear.naive import MAX_WEIGHT as LINEAR_WEIGHT
from pariskv_kernels.tiers import MAX_WEIGHT

__all__ = ["Votes", "collide", "collide_scaled"]


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


def collide_scaled(signs: Tensor, table: Tensor, lengths: Tensor, norms: Tensor | None) -> Votes:
    """Votes by a `linear_table`, times the keys' norms: estimated inner products on a logarithmic scale of a byte.

    signs       [B, H, S, N]    uint8, one bit-packed sign pattern per subspace
    table       [B, H, S, 2^m]  uint8, of `linear_table`
    lengths     [B]             int32, valid keys of each row
    norms       [B, H, N]       uint8, levels of `to_frame`; None: all alike
    returns     votes uint8, with 256 bins

    With v the sum of a key's weights and `middle` that of an inner product of 0, the vote of v > middle is
    16 + 16 x log2(v - middle), rounded, + the level of the norm; below lie 16 votes by v alone, 0 to 15.

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_dtype("signs", signs, torch.uint8)
    check_shape("signs", signs, None, None, None, None)
    check_dtype("table", table, torch.uint8)
    check_shape("table", table, *signs.shape[:3], None)
    check_shape("lengths", lengths, signs.shape[0])
    tensors = [signs, table, lengths]
    if norms is not None:
        check_dtype("norms", norms, torch.uint8)
        check_shape("norms", norms, *signs.shape[:2], signs.shape[3])
        tensors.append(norms)
    if is_compiled_for(*tensors):
        from pariskv_kernels.collide import cpu

        return cpu.collide_scaled(signs, table, lengths, norms, LINEAR_WEIGHT)
    if is_on_gpu(*tensors):
        from pariskv_kernels.collide import cuda

        return cuda.collide_scaled(signs, table, lengths, norms, LINEAR_WEIGHT)
    return naive.collide_scaled(signs, table, lengths, norms, LINEAR_WEIGHT)
