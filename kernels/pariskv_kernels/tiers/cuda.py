"""`tier_table` on a GPU: one block for each subspace, one thread for each pattern."""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.launch import launch
from pariskv_kernels.specialise import static, template
from pariskv_kernels.tiers.naive import MAX_WEIGHT, percent


def tier_table(rotated: Tensor, counts: Tensor, targets: Tensor) -> Tensor:
    batch, heads, subspaces, patterns = counts.shape
    table = torch.empty(counts.shape, dtype=torch.uint8, device=counts.device)
    kernel = tiers(PATTERNS=patterns, M=patterns.bit_length() - 1, MAX_WEIGHT=MAX_WEIGHT)
    launch(kernel, (subspaces, heads, batch), patterns, rotated, counts, targets, percent(counts.device), table)
    return table


@template
def tiers(rotated, counts, targets, percents, table):
    """No sort: a pattern's keys-before is the sum over the patterns that rank above it."""
    scores = cuda.shared.array(PATTERNS, np.float32)
    keys = cuda.shared.array(PATTERNS, np.int32)
    p, s, h, b = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    for j in static(M):
        coordinate = rotated[b, h, s * M + j]
        x[j] = -coordinate if p & (1 << j) else coordinate
    score = (x[0] + x[2]) + (x[1] + x[3])
    if M == 8:
        score = ((x[4] + x[6]) + (x[5] + x[7])) + score
    scores[p] = score
    keys[p] = counts[b, h, s, p]
    cuda.syncthreads()
    before = 0
    for first in range(0, PATTERNS, 16):
        for i in static(16):  # sixteen loads in flight
            rival[i] = scores[first + i]
            load[i] = keys[first + i]
        for i in static(16):
            if rival[i] > score or (rival[i] == score and first + i < p):
                before += load[i]
    weight = MAX_WEIGHT
    for tier in range(MAX_WEIGHT):
        if before * 100 >= percents[tier] * targets[b]:
            weight -= 1
    table[b, h, s, p] = weight
