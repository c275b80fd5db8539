"""The vote: how strongly each key's sign patterns collide with the query's."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.collide import naive
from pariskv_kernels.cpu import is_compiled_for


def collision_count(signs: Tensor, table: Tensor) -> Tensor:
    """Weighted votes of each key.

    signs    [B, H, S, N]    uint8, one bit-packed sign pattern per subspace
    table    [B, H, S, 2^m]  uint8, weight 0-6 of each pattern for this query
    returns  [B, H, N]       int32, at most 6 * S

    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.2; `naive.py` is the definition.
    """
    check_dtype("signs", signs, torch.uint8)
    check_shape("signs", signs, None, None, None, None)
    check_dtype("table", table, torch.uint8)
    check_shape("table", table, *signs.shape[:3], None)
    if is_compiled_for(signs, table):
        from pariskv_kernels.collide import cpu

        return cpu.collision_count(signs, table)
    return naive.collision_count(signs, table)
