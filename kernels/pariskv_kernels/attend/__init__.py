"""Attention of one token's queries to the rows of a working set."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.attend import naive
from pariskv_kernels.attend.other import Other
from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.launch import is_on_gpu

COMPILED = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = range(32, 257, 8)
"""Head sizes that the kernel takes; another one, and float64, stay on the definition."""


def attend_rows(
    heads: Tensor,
    rows: Tensor,
    steady: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    other: Other | None = None,
) -> tuple[Tensor, Tensor]:
    """One softmax over the rows that are in use; scaled, soft-capped, biased, masked, in this order.

    heads    [B, H, G, D]
    rows     [B, H, M, 2, D]  key and value of a token, in any layout that keeps D together
    steady   [B, T]           bool, which of the first T rows hold a token
    valid    [B, H, K]        bool, the same of the K rows after them; None: no such rows. T + K <= M
    bias     [B, H, G, K]     float, added to the scores of these K rows, -inf where a query head did not choose
    other    gives an attention over other rows, out [B, H, G, D] and log-sum-exp [B, H, G], to be merged in; float32,
             float64 where the heads are; out is not read where its log-sum-exp is -inf. Asked last: it may be found
             beside this one
    returns  out [B, H, G, D] in the heads' dtype, 0 where no row is in use, and the scores' log-sum-exp
             [B, H, G] in float32 (float64 of float64), -inf where none is

    Rows that are not in use may hold anything: masking selects. Computed in float32 at least.
    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("heads", heads)
    check_shape("heads", heads, None, None, None, None)
    batch, num_heads, group, head_dim = heads.shape
    check_dtype("rows", rows, heads.dtype)
    check_shape("rows", rows, batch, num_heads, None, 2, head_dim)
    check_dtype("steady", steady, torch.bool)
    check_shape("steady", steady, batch, None)
    slots = 0
    if valid is not None:
        check_dtype("valid", valid, torch.bool)
        check_shape("valid", valid, batch, num_heads, None)
        slots = valid.shape[2]
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, batch, num_heads, group, slots)
    if steady.shape[1] + slots > rows.shape[2]:
        raise ValueError(
            f"rows: wanted at least {steady.shape[1]} steady and {slots} selected rows a head, got {rows.shape[2]}"
        )
    if is_on_gpu(heads, rows) and heads.dtype in COMPILED and head_dim in HEAD_DIMS:
        from pariskv_kernels.attend import cuda

        return cuda.attend_rows(heads, rows, steady, valid, bias, scaling, softcap, other)
    return naive.attend_rows(heads, rows, steady, valid, bias, scaling, softcap, other)
