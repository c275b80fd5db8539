"""`to_frame` on a GPU, to the bit what `naive.py` gives: a thread for each coordinate, a tile of tokens at a time.

And `queries_to_frame`: a few columns of the matrix for each block, which many threads read together.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import loads_first, product, to_float
from pariskv_kernels.frame.naive import NORM_LEVELS, Framed, FramedQueries, inverse, norm_thresholds
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

TILE = 16
"""Tokens that share what a block reads of the matrix."""

COLUMNS = 16
"""Columns of the matrix that a block multiplies the queries with."""

PARTS = 16
"""Threads that share a column."""


def to_frame(keys: Tensor, centre: Tensor, matrix: Tensor, power: Tensor, tile: int = TILE) -> Framed:
    batch, heads, tokens, dim = keys.shape
    padded, device = matrix.shape[3], keys.device
    z = torch.empty(batch, heads, tokens, padded, device=device)
    norms = torch.empty(batch, heads, tokens, dtype=torch.uint8, device=device)
    kernel = frame_tile(DIM=dim, PADDED=padded, TILE=tile, LEVELS=NORM_LEVELS, load=to_float(keys.dtype))
    launch(
        kernel,
        (blocks_for(tokens, tile), heads, batch),
        padded,
        keys,
        centre,
        matrix,
        inverse(power),
        norm_thresholds(device),
        z,
        norms,
    )
    return Framed(z, norms)


@template
def frame_tile(keys, centre, matrix, inverse_power, thresholds, z, norms):
    """Each thread holds its coordinate of all tokens of the tile; then their squares are added in shared memory."""
    x = cuda.shared.array(TILE * DIM, np.float32)
    squares = cuda.shared.array(TILE * PADDED, np.float32)
    p, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    first, tokens = cuda.blockIdx.x * TILE, keys.shape[2]
    for i in range(p, TILE * DIM, PADDED):
        t, d = i // DIM, i % DIM
        x[i] = np.float32(0)
        if first + t < tokens:
            x[i] = load(keys[b, h, first + t, d]) - centre[b, h, d]
    cuda.syncthreads()
    for t in static(TILE):
        total[t] = np.float32(0)
    for d in range(DIM):
        factor = matrix[b, h, d, p]
        for t in static(TILE):
            total[t] = total[t] + product(x[t * DIM + d], factor)
    for t in static(TILE):
        squares[t * PADDED + p] = product(total[t], total[t])
        if first + t < tokens:
            z[b, h, first + t, p] = total[t]
    half = PADDED // 2
    while half > 0:
        cuda.syncthreads()
        if p < half:
            for t in range(TILE):
                squares[t * PADDED + p] = squares[t * PADDED + p] + squares[t * PADDED + p + half]
        half //= 2
    cuda.syncthreads()
    for t in range(p, TILE, PADDED):
        if first + t < tokens:
            relative = product(squares[t * PADDED], inverse_power[b, h])
            low, high = 0, LEVELS - 1
            while low < high:
                middle = (low + high) // 2
                if relative >= thresholds[middle]:
                    low = middle + 1
                else:
                    high = middle
            norms[b, h, first + t] = low


def queries_to_frame(
    heads: Tensor, centre: Tensor, matrix: Tensor, weights: Tensor, columns: int = COLUMNS, parts: int = PARTS
) -> FramedQueries:
    batch, num_heads, group, dim = heads.shape
    padded, device = matrix.shape[3], heads.device
    columns = min(columns, padded)
    turned = torch.empty(batch, num_heads, group, padded, device=device)
    rotated = torch.empty(batch, num_heads, padded, device=device)
    offset = torch.empty(batch, num_heads, group, device=device)
    constants = {"DIM": dim, "PADDED": padded, "GROUP": group, "COLUMNS": columns, "PARTS": parts}
    kernel = frame_queries(
        **constants, ROUNDS=blocks_for(dim, parts), THREADS=columns * parts, load=to_float(heads.dtype)
    )
    # The last block multiplies with the centre.
    grid = (padded // columns + 1, num_heads, batch)
    launch(kernel, grid, columns * parts, heads, centre, matrix, weights, turned, rotated, offset)
    return FramedQueries(turned, rotated, offset)


@template
def frame_queries(heads, centre, matrix, weights, turned, rotated, offset):
    """A thread has some of a column's entries, which it multiplies with every head's; then the parts are added."""
    query = cuda.shared.array(GROUP * DIM, np.float32)
    sums = cuda.shared.array(PARTS * GROUP * COLUMNS, np.float32)
    found = cuda.shared.array(GROUP * COLUMNS, np.float32)
    thread, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    column, part, first = thread % COLUMNS, thread // COLUMNS, cuda.blockIdx.x * COLUMNS
    is_centre = first == PADDED
    if is_centre:
        for i in static(ROUNDS):
            entry[i] = centre[b, h, min(part + i * PARTS, DIM - 1)]
    else:
        for i in static(ROUNDS):
            entry[i] = matrix[b, h, min(part + i * PARTS, DIM - 1), first + column]
    loads_first()
    for i in range(thread, GROUP * DIM, THREADS):
        query[i] = load(heads[b, h, i // DIM, i % DIM])
    cuda.syncthreads()
    for g in static(GROUP):
        total[g] = np.float32(0)
    for i in static(ROUNDS):
        d = part + i * PARTS
        if d < DIM:
            for g in static(GROUP):
                total[g] += entry[i] * query[g * DIM + d]
    for g in static(GROUP):
        sums[(part * GROUP + g) * COLUMNS + column] = total[g]
    cuda.syncthreads()
    for i in range(thread, GROUP * COLUMNS, THREADS):
        whole = np.float32(0)
        for p in range(PARTS):
            whole += sums[p * GROUP * COLUMNS + i]
        found[i] = whole
        if not is_centre:
            turned[b, h, i // COLUMNS, first + i % COLUMNS] = whole
        elif i % COLUMNS == 0:
            offset[b, h, i // COLUMNS] = whole
    cuda.syncthreads()
    if thread < COLUMNS and not is_centre:
        mean = np.float32(0)
        for g in range(GROUP):
            mean += found[g * COLUMNS + thread] * weights[b, h, g]
        rotated[b, h, first + thread] = mean / np.float32(GROUP)
