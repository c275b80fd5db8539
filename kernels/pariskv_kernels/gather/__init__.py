"""Rows of a store copied to the slots of a working set."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.gather import naive
from pariskv_kernels.launch import is_on_gpu


def gather_rows(rows: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Write the chosen rows into `out` and say which slots hold one; the other slots become zero.

    rows     [B, H, N, 2, D]  key and value of a token side by side; device memory, or host memory that it maps
    indices  [B, H, K]        int32, -1 where empty; fastest where each head's are ascending
    out      [B, H, K, 2, D]  of the rows' dtype, may be a view of a larger buffer
    returns  [B, H, K]        bool

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    _check(rows, indices, out)
    if is_on_gpu(rows, indices, out):
        from pariskv_kernels.gather import cuda

        return cuda.gather_rows(rows, indices, out)
    if is_compiled_for(rows, indices, out):
        from pariskv_kernels.gather import cpu

        return cpu.gather_rows(rows, indices, out)
    return naive.gather_rows(rows, indices, out)


def gather_changed(rows: Tensor, indices: Tensor, held: Tensor, out: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_rows` into slots that still hold what an earlier call wrote: what is there already is not copied.

    A chosen position that a slot holds stays in that slot. The others go, in the order of the selection, to the
    free slots, in ascending order. Slots that are left over become zero.

    rows     [B, H, N, 2, D]
    indices  [B, H, K]        int32, -1 where empty, no position twice; on a GPU at most 4096, and fastest ascending
                              with -1 at the end (otherwise they are sorted first)
    held     [B, H, K]        int32, updated: the position in each slot of `out`, -1 where none. Before the first
                              call, and whenever rows or slots were changed otherwise, `held.fill_(-1)`
    out      [B, H, K, 2, D]  of the rows' dtype, may be a view of a larger buffer
    counts   [2]              int64, added to: chosen positions that were there already, chosen positions
    returns  valid bool [B, H, K], and order int32 [B, H, K]: which entry of the selection a slot holds, -1 for none

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    _check(rows, indices, out)
    check_dtype("held", held, torch.int32)
    check_shape("held", held, *indices.shape)
    check_dtype("counts", counts, torch.int64)
    check_shape("counts", counts, 2)
    if is_on_gpu(rows, indices, held, out, counts):
        from pariskv_kernels.gather import cuda

        return cuda.gather_changed(rows, indices, held, out, counts)
    return naive.gather_changed(rows, indices, held, out, counts)


def _check(rows: Tensor, indices: Tensor, out: Tensor) -> None:
    check_shape("rows", rows, None, None, None, 2, None)
    batch, heads, _, _, head_dim = rows.shape
    check_dtype("indices", indices, torch.int32)
    check_shape("indices", indices, batch, heads, None)
    check_dtype("out", out, rows.dtype)
    check_shape("out", out, batch, heads, indices.shape[2], 2, head_dim)
