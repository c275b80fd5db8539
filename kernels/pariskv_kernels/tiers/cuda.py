"""`tier_table` on a GPU: one block for each subspace, SPLIT threads for each pattern and its complement."""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import loads_first
from pariskv_kernels.launch import launch
from pariskv_kernels.specialise import static, template
from pariskv_kernels.tiers.naive import MAX_WEIGHT, Shares, percent, shares_on

SPLIT = 4
"""Threads that look at a part of the rivals each."""


def tier_table(rotated: Tensor, counts: Tensor, lengths: Tensor, shares: Shares) -> Tensor:
    batch, heads, subspaces, patterns = counts.shape
    device = counts.device
    table = torch.empty(counts.shape, dtype=torch.uint8, device=device)
    constants = {"PATTERNS": patterns, "M": patterns.bit_length() - 1, "MAX_WEIGHT": MAX_WEIGHT, "SPLIT": SPLIT}
    launch(
        tiers(**constants, NUM_SHARES=len(shares)),
        (subspaces, heads, batch),
        SPLIT * patterns // 2,
        rotated,
        counts,
        lengths,
        shares_on(shares, device),
        percent(device),
        table,
    )
    return table


@template
def tiers(rotated, counts, lengths, shares, percents, table):
    """No sort: a pattern's keys-before is the sum over the patterns that rank above it.

    The complement of a pattern has the negative of its score, to the bit: one look at a rival serves both.
    """
    scores = cuda.shared.array(PATTERNS, np.float32)
    keys = cuda.shared.array(PATTERNS, np.int32)
    before = cuda.shared.array(PATTERNS, np.int32)
    thread = cuda.threadIdx.x & 1023
    s, h, b = cuda.blockIdx.x & 65535, cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    p, part = thread % (PATTERNS // 2), thread // (PATTERNS // 2)
    q = PATTERNS - 1 - p
    for j in static(M):
        coordinate = rotated[b, h, s * M + j]
        x[j] = -coordinate if p & (1 << j) else coordinate
    score = (x[0] + x[2]) + (x[1] + x[3])
    if M == 8:
        score = ((x[4] + x[6]) + (x[5] + x[7])) + score
    if part == 0:
        scores[p], scores[q] = score, -score
        keys[p], keys[q] = counts[b, h, s, p], counts[b, h, s, q]
        before[p], before[q] = 0, 0
    length = np.int64(lengths[b])
    for i in static(NUM_SHARES):
        start[i], percent_from[i] = shares[0, i], shares[1, i]
    for tier in static(MAX_WEIGHT):
        bound[tier] = percents[tier]
    loads_first()
    share = percent_from[0]
    for i in static(NUM_SHARES):
        share = percent_from[i] if length >= start[i] else share
    target = (share * length + 99) // 100
    cuda.syncthreads()
    before_p, before_q = 0, 0
    for first in range(part * (PATTERNS // SPLIT), (part + 1) * (PATTERNS // SPLIT), 4):
        for i in static(4):  # loads in flight
            rival[i] = scores[first + i]
            load[i] = keys[first + i]
        for i in static(4):
            if rival[i] > score or (rival[i] == score and first + i < p):
                before_p += load[i]
            if rival[i] > -score or (rival[i] == -score and first + i < q):
                before_q += load[i]
    cuda.atomic.add(before, p, before_p)
    cuda.atomic.add(before, q, before_q)
    cuda.syncthreads()
    for pattern in range(thread, PATTERNS, SPLIT * PATTERNS // 2):
        weight = MAX_WEIGHT
        for tier in static(MAX_WEIGHT):
            if before[pattern] * 100 >= bound[tier] * target:
                weight -= 1
        table[b, h, s, pattern] = weight
