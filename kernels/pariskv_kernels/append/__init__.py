"""A step's own token: its key and value into each row's next slot of the sink or the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.append import naive
from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.launch import is_on_gpu


def append_token(
    keys: Tensor, values: Tensor, rows: Tensor, steady: Tensor, length: Tensor, active: Tensor, sink: int
) -> None:
    """Put one token at the end of every row.

    keys, values  [B, H, 1, D]
    rows          [B, H, M, 2, D]  of the same dtype; of its slots the sink's come first, then the ring's
    steady        [B, sink + ring]  bool, which of these slots hold a token; the new one's becomes `active`
    length        [B]  int64, tokens of each row; grows by one where the row is active
    active        [B]  bool; what is written for a row that is not stays invalid
    sink          the first token that goes to the ring

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    batch, heads, _, dim = keys.shape
    check_shape("keys", keys, batch, heads, 1, dim)
    check_shape("values", values, batch, heads, 1, dim)
    check_shape("rows", rows, batch, heads, None, 2, dim)
    check_dtype("rows", rows, keys.dtype)
    check_dtype("values", values, keys.dtype)
    check_shape("steady", steady, batch, None)
    check_dtype("steady", steady, torch.bool)
    check_shape("length", length, batch)
    check_dtype("length", length, torch.int64)
    check_shape("active", active, batch)
    check_dtype("active", active, torch.bool)
    if not 0 <= sink < steady.shape[1] <= rows.shape[2]:
        raise ValueError(
            f"sink: wanted 0 to {steady.shape[1] - 1} of the {steady.shape[1]} slots, which rows has "
            f"{rows.shape[2]} of; got {sink}"
        )
    if is_on_gpu(keys, values, rows, steady, length, active):
        from pariskv_kernels.append import cuda

        cuda.append_token(keys, values, rows, steady, length, active, sink)
    else:
        naive.append_token(keys, values, rows, steady, length, active, sink)
