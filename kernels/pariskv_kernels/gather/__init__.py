"""Rows of a store copied to the slots of a working set."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.gather import naive


def gather_rows(rows: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Write the chosen rows into `out` and say which slots hold one; the other slots become zero.

    rows     [B, H, N, 2, D]  key and value of a token side by side
    indices  [B, H, K]        int32, -1 where empty
    out      [B, H, K, 2, D]  of the rows' dtype, may be a view of a larger buffer
    returns  [B, H, K]        bool

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_shape("rows", rows, None, None, None, 2, None)
    batch, heads, _, _, head_dim = rows.shape
    check_dtype("indices", indices, torch.int32)
    check_shape("indices", indices, batch, heads, None)
    check_dtype("out", out, rows.dtype)
    check_shape("out", out, batch, heads, indices.shape[2], 2, head_dim)
    if is_compiled_for(rows, indices, out):
        from pariskv_kernels.gather import cpu

        return cpu.gather_rows(rows, indices, out)
    return naive.gather_rows(rows, indices, out)
