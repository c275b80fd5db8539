"""`combine_scores` on a GPU: the log-sum-exp of a head's parts, then every candidate by itself."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.combine.naive import COMBINE
from pariskv_kernels.device import block_max, block_sum
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

MOST_PARTS = 64
"""Parts of a row, whose sums the second kernel adds."""

ITEMS = 4
"""Candidates of a thread of a part, where the row is not too long for that."""

LANES = 8
"""Threads that add up the parts of one head."""

NOTHING = np.float32(-math.inf)


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
    parts = max(1, min(MOST_PARTS, blocks_for(num, threads * ITEMS)))
    sums = torch.empty(batch, heads, group, parts, 2, dtype=torch.float32, device=products.device)
    if how != "max_logit":
        kernel = sum_part(THREADS=threads, GROUP=group, CAPPED=softcap is not None)
        numbers = np.float32(scaling), np.float32(softcap or 0)
        launch(kernel, (parts, heads * group, batch), threads, products, offset, sums, *numbers)
    return combine_by_sums(products, offset, steady, sums, how, scaling, softcap, threads)


def combine_by_sums(
    products: Tensor,
    offset: Tensor,
    steady: Tensor,
    sums: Tensor,
    how: str,
    scaling: float,
    softcap: float | None,
    threads: int = 256,
) -> Tensor:
    """The same for sums [B, H, G, parts, 2] that are there: the highest score of a part, the sum of exp(score - it)."""
    batch, heads, group, num = products.shape
    combined = torch.empty(batch, heads, num, dtype=torch.float32, device=products.device)
    kernel = combine(THREADS=threads, GROUP=group, CAPPED=softcap is not None, HOW=COMBINE.index(how), LANES=LANES)
    grid = (max(1, min(blocks_for(num, threads), 65535)) if num else 0, heads, batch)
    numbers = np.float32(scaling), np.float32(softcap or 0)
    launch(kernel, grid, threads, products, offset, steady, sums, combined, *numbers)
    return combined


@cuda.jit(device=True)
def capped(score, softcap):
    return softcap * math.tanh(score / softcap) if score > NOTHING else score


@template
def sum_part(products, offset, sums, scaling, softcap):
    """The highest score of a part of a head's candidates, and the sum of exp(score - highest)."""
    warps = cuda.shared.array(32, np.float32)
    thread, part, b = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.z
    h, g = cuda.blockIdx.y // GROUP, cuda.blockIdx.y % GROUP
    num, step = products.shape[3], cuda.gridDim.x * THREADS
    own_offset = offset[b, h, g]
    highest = NOTHING
    for c in range(part * THREADS + thread, num, step):
        highest = max(highest, products[b, h, g, c])
    highest = (block_max(highest, warps, thread, THREADS) + own_offset) * scaling  # scaling > 0: the same order,
    if CAPPED:
        highest = capped(highest, softcap)  # and capping keeps it
    total = np.float32(0)
    for c in range(part * THREADS + thread, num, step):
        score = (products[b, h, g, c] + own_offset) * scaling
        if CAPPED:
            score = capped(score, softcap)
        if score > NOTHING:
            total += math.exp(score - highest)
    total = block_sum(total, warps, thread, THREADS)
    if thread == 0:
        sums[b, h, g, part, 0], sums[b, h, g, part, 1] = highest, total


@template
def combine(products, offset, steady, sums, combined, scaling, softcap):
    """Some threads of each head add up its parts, one adds those, then every thread has candidates of its own."""
    highest = cuda.shared.array(GROUP * LANES, np.float32)
    total = cuda.shared.array(GROUP * LANES, np.float32)
    whole = cuda.shared.array(GROUP, np.float32)
    thread, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    num = products.shape[3]
    if HOW > 0:
        for i in range(thread, GROUP * LANES, THREADS):
            top, mass = NOTHING, np.float32(0)
            for part in range(i % LANES, sums.shape[3], LANES):
                top = max(top, sums[b, h, i // LANES, part, 0])
            for part in range(i % LANES, sums.shape[3], LANES):
                if sums[b, h, i // LANES, part, 0] > NOTHING:
                    mass += sums[b, h, i // LANES, part, 1] * math.exp(sums[b, h, i // LANES, part, 0] - top)
            highest[i], total[i] = top, mass
        cuda.syncthreads()
        for g in range(thread, GROUP, THREADS):
            top = steady[b, h, g]
            for i in range(LANES):
                top = max(top, highest[g * LANES + i])
            whole[g] = np.float32(0)
            if top > NOTHING:
                mass = np.float32(math.exp(steady[b, h, g] - top))
                for i in range(LANES):
                    if total[g * LANES + i] > 0:
                        mass += total[g * LANES + i] * math.exp(highest[g * LANES + i] - top)
                whole[g] = top + math.log(mass)
        cuda.syncthreads()
    for c in range(cuda.blockIdx.x * THREADS + thread, num, cuda.gridDim.x * THREADS):
        best = NOTHING
        for g in static(GROUP):
            score[g] = (products[b, h, g, c] + offset[b, h, g]) * scaling
            if CAPPED:
                score[g] = capped(score[g], softcap)
            if HOW > 0:
                score[g] = np.float32(score[g] - whole[g])
            best = np.float32(max(best, score[g]))
        if HOW == 1 and best > NOTHING:
            sum_of_shares = np.float32(0)
            for g in static(GROUP):
                sum_of_shares = np.float32(sum_of_shares + math.exp(score[g] - best))
            best = np.float32(best + math.log(sum_of_shares))
        combined[b, h, c] = best
