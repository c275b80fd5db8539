"""Keys in the frame in which they are encoded, centred, turned and stretched; and the queries that belong to them."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.frame import naive
from pariskv_kernels.frame.naive import NORM_LEVELS, NORM_STEPS, Framed, FramedQueries
from pariskv_kernels.launch import is_on_gpu

__all__ = ["NORM_LEVELS", "NORM_STEPS", "Framed", "FramedQueries", "queries_to_frame", "to_frame"]


def to_frame(keys: Tensor, centre: Tensor, matrix: Tensor, power: Tensor) -> Framed:
    """Coordinates z = (k - centre) @ matrix of a block of keys, and their norms: `z`, `norms`, see `Framed`.

    keys     [B, H, n, D] of any floating-point dtype and strides; the arithmetic is float32, for float64 too
    centre   [B, H, D]     float32
    matrix   [B, H, D, P]  float32, P a power of two
    power    [B, H]        float32, the mean of |z|^2 over the keys that the frame was made for

    Bit-identical however the tokens are split into blocks. Raises TypeError or ValueError naming the argument.
    `naive.py` is the definition.
    """
    check_float("keys", keys)
    check_shape("keys", keys, None, None, None, None)
    batch, heads, _, dim = keys.shape
    check_shape("centre", centre, batch, heads, dim)
    check_shape("matrix", matrix, batch, heads, dim, None)
    check_shape("power", power, batch, heads)
    for name, tensor in (("centre", centre), ("matrix", matrix), ("power", power)):
        check_dtype(name, tensor, torch.float32)
    padded = matrix.shape[3]
    if padded < 1 or padded & (padded - 1):
        raise ValueError(f"matrix: wanted a power of two of columns, got {padded}")
    if is_compiled_for(keys, centre, matrix, power):
        from pariskv_kernels.frame import cpu

        return cpu.to_frame(keys, centre, matrix, power)
    if keys.dtype != torch.float64 and is_on_gpu(keys, centre, matrix, power):
        from pariskv_kernels.frame import cuda

        return cuda.to_frame(keys, centre, matrix, power)
    return naive.to_frame(keys, centre, matrix, power)


def queries_to_frame(heads: Tensor, centre: Tensor, matrix: Tensor, weights: Tensor) -> FramedQueries:
    """A step's queries as the frame has them: `heads`, `rotated`, `offset`, see `FramedQueries`.

    heads    [B, H, G, D] of any floating-point dtype and strides; the arithmetic is float32, for float64 too
    centre   [B, H, D]     float32, of the keys
    matrix   [B, H, D, P]  float32, for queries
    weights  [B, H, G]     float32, how much each head counts in `rotated`

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("heads", heads)
    check_shape("heads", heads, None, None, None, None)
    batch, num_heads, group, dim = heads.shape
    check_shape("centre", centre, batch, num_heads, dim)
    check_shape("matrix", matrix, batch, num_heads, dim, None)
    check_shape("weights", weights, batch, num_heads, group)
    for name, tensor in (("centre", centre), ("matrix", matrix), ("weights", weights)):
        check_dtype(name, tensor, torch.float32)
    if heads.dtype != torch.float64 and is_on_gpu(heads, centre, matrix, weights):
        from pariskv_kernels.frame import cuda

        return cuda.queries_to_frame(heads, centre, matrix, weights)
    return naive.queries_to_frame(heads, centre, matrix, weights)
