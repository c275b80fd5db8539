"""`linear_table` on a GPU: one block for each subspace, each of which finds the head's largest inner product."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import product
from pariskv_kernels.launch import launch
from pariskv_kernels.linear.naive import MAX_WEIGHT
from pariskv_kernels.specialise import static, template


def linear_table(rotated: Tensor, subspace_dim: int) -> Tensor:
    batch, heads, padded = rotated.shape
    subspaces, patterns = padded // subspace_dim, 1 << subspace_dim
    table = torch.empty(batch, heads, subspaces, patterns, dtype=torch.uint8, device=rotated.device)
    constants = {"M": subspace_dim, "PATTERNS": patterns, "SUBSPACES": subspaces, "HALF": MAX_WEIGHT // 2}
    launch(linear(**constants), (subspaces, heads, batch), max(patterns, subspaces), rotated, table)
    return table


@template
def linear(rotated, table):
    """A thread for each pattern. The largest inner product of a subspace is the sum of its coordinates' magnitudes."""
    most = cuda.shared.array(SUBSPACES, np.float32)
    thread, s, h, b = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    if thread < SUBSPACES:
        for j in static(M):
            x[j] = abs(rotated[b, h, thread * M + j])
        largest = (x[0] + x[2]) + (x[1] + x[3])
        if M == 8:
            largest = ((x[4] + x[6]) + (x[5] + x[7])) + largest
        most[thread] = largest
    cuda.syncthreads()
    if thread < PATTERNS:
        largest = np.float32(0)
        for i in range(SUBSPACES):
            largest = max(largest, most[i])
        factor = np.float32(HALF) / largest if largest > 0 else np.float32(0)
        for j in static(M):
            coordinate = rotated[b, h, s * M + j]
            x[j] = -coordinate if thread & (1 << j) else coordinate
        score = (x[0] + x[2]) + (x[1] + x[3])
        if M == 8:
            score = ((x[4] + x[6]) + (x[5] + x[7])) + score
        weight = math.floor(product(score, factor) + np.float32(HALF + 0.5))
        table[b, h, s, thread] = min(max(int(weight), 0), 2 * HALF)
