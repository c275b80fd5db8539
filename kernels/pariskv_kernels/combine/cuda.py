"""`combine_scores` on a GPU: the log-sum-exp of a head's parts, then every candidate by itself."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.combine.naive import COMBINE
from pariskv_kernels.launch import blocks_for, launch, multiprocessors
from pariskv_kernels.specialise import static, template

MOST_PARTS = 32
"""Parts of a row, whose sums the second kernel adds."""


def combine_scores(
    products: Tensor,
    offset: Tensor,
    steady: Tensor,
    how: str,
    scaling: float,
    softcap: float | None,
    threads: int = 256,
) -> Tensor:
    batch, heads, group, num = products.shape
    device = products.device
    combined = torch.empty(batch, heads, num, dtype=torch.float32, device=device)
    parts = max(1, min(MOST_PARTS, blocks_for(4 * multiprocessors(device), batch * heads * group)))
    parts = min(parts, max(1, blocks_for(num, threads)))
    sums = torch.empty(batch, heads, group, parts, 2, dtype=torch.float32, device=device)
    constants = {"THREADS": threads, "GROUP": group, "PARTS": parts, "CAPPED": softcap is not None}
    numbers = np.float32(scaling), np.float32(softcap or 0)
    if how != "max_logit":
        grid = (parts, heads * group, batch)
        launch(sum_part(**constants), grid, threads, products, offset, sums, *numbers)
    kernel = combine(**constants, HOW=COMBINE.index(how))
    grid = (max(1, min(blocks_for(num, threads), 65535)) if num else 0, heads, batch)
    launch(kernel, grid, threads, products, offset, steady, sums, combined, *numbers)
    return combined


@cuda.jit(device=True)
def capped(score, softcap):
    return softcap * math.tanh(score / softcap) if score > -math.inf else score


@template
def sum_part(products, offset, sums, scaling, softcap):
    """The highest score of a part of a head's candidates, and the sum of exp(score - highest)."""
    shared = cuda.shared.array(THREADS, np.float32)
    thread, part, b = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.z
    h, g = cuda.blockIdx.y // GROUP, cuda.blockIdx.y % GROUP
    num = products.shape[3]
    highest = np.float32(-math.inf)
    for c in range(part * THREADS + thread, num, PARTS * THREADS):
        highest = max(highest, products[b, h, g, c])
    shared[thread] = highest
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if thread < half:
            shared[thread] = max(shared[thread], shared[thread + half])
        half //= 2
    cuda.syncthreads()
    highest = (shared[0] + offset[b, h, g]) * scaling  # scaling > 0, and capping keeps the order
    if CAPPED:
        highest = capped(highest, softcap)
    cuda.syncthreads()
    total = np.float32(0)
    for c in range(part * THREADS + thread, num, PARTS * THREADS):
        score = (products[b, h, g, c] + offset[b, h, g]) * scaling
        if CAPPED:
            score = capped(score, softcap)
        if score > -math.inf:
            total += math.exp(score - highest)
    shared[thread] = total
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if thread < half:
            shared[thread] = shared[thread] + shared[thread + half]
        half //= 2
    cuda.syncthreads()
    if thread == 0:
        sums[b, h, g, part, 0], sums[b, h, g, part, 1] = highest, shared[0]


@template
def combine(products, offset, steady, sums, combined, scaling, softcap):
    """Each thread adds up the parts for itself: they are few, and all threads read the same."""
    thread, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    num = products.shape[3]
    for g in static(GROUP):
        whole[g] = np.float32(0)
        if HOW > 0:
            highest = steady[b, h, g]
            for part in range(PARTS):
                highest = max(highest, sums[b, h, g, part, 0])
            if highest > -math.inf:
                total = math.exp(steady[b, h, g] - highest)
                for part in range(PARTS):
                    if sums[b, h, g, part, 0] > -math.inf:
                        total += sums[b, h, g, part, 1] * math.exp(sums[b, h, g, part, 0] - highest)
                whole[g] = np.float32(highest + math.log(total))
    for c in range(cuda.blockIdx.x * THREADS + thread, num, cuda.gridDim.x * THREADS):
        best = np.float32(-math.inf)
        for g in static(GROUP):
            score[g] = (products[b, h, g, c] + offset[b, h, g]) * scaling
            if CAPPED:
                score[g] = capped(score[g], softcap)
            score[g] = np.float32(score[g] - whole[g])
            best = max(best, score[g])
        if HOW == 1 and best > -math.inf:
            sum_of_shares = np.float32(0)
            for g in static(GROUP):
                sum_of_shares = np.float32(sum_of_shares + math.exp(score[g] - best))
            best = np.float32(best + math.log(sum_of_shares))
        combined[b, h, c] = best
