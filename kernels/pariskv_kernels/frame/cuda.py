"""`to_frame` on a GPU, to the bit what `naive.py` gives: a thread for each coordinate, a tile of tokens at a time."""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import product, to_float
from pariskv_kernels.frame.naive import NORM_LEVELS, Framed, inverse, norm_thresholds
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

TILE = 16
"""Tokens that share what a block reads of the matrix."""


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
