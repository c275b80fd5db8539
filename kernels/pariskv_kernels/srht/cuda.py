"""`rotate_group_mean` on a GPU: one block for each key/value head."""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import to_float
from pariskv_kernels.launch import launch
from pariskv_kernels.specialise import template
from pariskv_kernels.srht.naive import random_signs


def rotate_group_mean(heads: Tensor, padded: int, seed: int) -> Tensor:
    batch, kv_heads, group, dim = heads.shape
    out = torch.empty(batch, kv_heads, padded, dtype=torch.float32, device=heads.device)
    kernel = rotate_mean(GROUP=group, PADDED=padded, load=to_float(heads.dtype))
    launch(kernel, (kv_heads, batch), padded, heads, random_signs(dim, seed, heads.device), out)
    return out


@template
def rotate_mean(heads, flips, out):
    """A thread for each coordinate: the group's mean, its sign, then the butterflies in shared memory."""
    z = cuda.shared.array(PADDED, np.float32)
    d, h, b = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    mean = np.float32(0)
    if d < heads.shape[3]:
        mean = load(heads[b, h, 0, d])
        for g in range(1, GROUP):
            mean += load(heads[b, h, g, d])
        mean = mean / np.float32(GROUP) * flips[d]
    z[d] = mean
    half = PADDED // 2
    while half > 0:
        cuda.syncthreads()
        mine, other = z[d], z[d ^ half]
        cuda.syncthreads()
        z[d] = other - mine if d & half else mine + other
        half //= 2
    out[b, h, d] = z[d]
