"""`combine_scores` on a GPU: the log-sum-exp of a head's parts, then every candidate by itself."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.combine.naive import COMBINE
from pariskv_kernels.device import WARP, block_max, block_sum, exchanged, joined
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

MOST_PARTS = 64
"""Parts of a row, whose sums the second kernel adds."""

ITEMS = 4
"""Candidates of a thread of a part, where the row is not too long for that."""

LOADS = 4
"""Parts that a thread asks for before it uses the first."""

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
    kernel = combine(THREADS=threads, GROUP=group, CAPPED=softcap is not None, HOW=COMBINE.index(how), LOADS=LOADS)
    grid = blocks_for(num, threads), heads, batch
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
    """A candidate for each thread; while its products are on their way, a warp adds up the parts of a head."""
    exchange = cuda.shared.array(THREADS, np.float32)
    whole = cuda.shared.array(GROUP, np.float32)
    thread, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    lane, num, parts = thread % WARP, products.shape[3], sums.shape[3]
    own = cuda.blockIdx.x * THREADS + thread
    for g in static(GROUP):
        score[g] = products[b, h, g, min(own, num - 1)]
    if HOW > 0:
        # The same number of rounds for all warps; those without a head of their own look at the last one again.
        for start in range(0, GROUP, THREADS // WARP):
            g = min(start + thread // WARP, GROUP - 1)
            top, mass = NOTHING, np.float32(0)
            for first in range(lane, parts, WARP * LOADS):
                for i in static(LOADS):
                    highest[i] = sums[b, h, g, min(first + i * WARP, parts - 1), 0]
                    total[i] = sums[b, h, g, min(first + i * WARP, parts - 1), 1]
                for i in static(LOADS):
                    if first + i * WARP < parts:
                        top, mass = joined(top, mass, highest[i], total[i])
            for k in static(5):
                other_top = exchanged(top, exchange, thread, 16 >> k)
                other_mass = exchanged(mass, exchange, thread, 16 >> k)
                top, mass = joined(top, mass, other_top, other_mass)
            top, mass = joined(top, mass, steady[b, h, g], np.float32(1))
            if lane == 0:
                whole[g] = top + math.log(mass) if mass > 0 else np.float32(0)
        cuda.syncthreads()
    best = NOTHING
    for g in static(GROUP):
        score[g] = np.float32((score[g] + offset[b, h, g]) * scaling)
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
    if own < num:
        combined[b, h, own] = best
