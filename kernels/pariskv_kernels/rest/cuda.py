"""`weigh_candidates` and `estimate_rest` on a GPU, a launch each."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import WARP, exchanged, joined, loads_first, to_float
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.rest.naive import LEAST, NEWTON_STEPS, Known, Rest, Weighed
from pariskv_kernels.specialise import static, template

COLUMNS = 16
"""Columns of the slopes that a block multiplies the queries with."""

PARTS = 16
"""Threads that share a column."""

NOTHING = np.float32(-math.inf)
ROOT_HALF = np.float32(math.sqrt(0.5))
DENSITY = np.float32(1 / math.sqrt(2 * math.pi))
FARTHEST = np.float32(12)
"""Standard deviations at which the tail of a normal distribution is nothing, and float32 still holds it."""


def weigh_candidates(
    heads: Tensor, candidates: Tensor, known: Known, scaling: float, columns: int = COLUMNS, parts: int = PARTS
) -> Weighed:
    """columns x parts: threads of a block, whole warps"""
    batch, num_heads, group, dim = heads.shape
    shift = torch.empty(batch, num_heads, group, dim, dtype=torch.float32, device=heads.device)
    whole, beyond = torch.empty(2, batch, num_heads, group, dtype=torch.float32, device=heads.device)
    constants = {"DIM": dim, "GROUP": group, "COLUMNS": columns, "PARTS": parts, "HAS_OFFSET": known.offset is not None}
    kernel = weigh(**constants, ROUNDS=blocks_for(dim, parts), THREADS=columns * parts, load=to_float(heads.dtype))
    grid = (blocks_for(dim, columns), num_heads, batch)
    zone = known.length, whole if known.offset is None else known.offset, known.slopes
    launch(kernel, grid, columns * parts, heads, candidates, *zone, np.float32(scaling), whole, beyond, shift)
    return Weighed(whole, beyond, shift)


def estimate_rest(weighed: Weighed, chosen: Tensor, mean: Tensor, threads: int = 128) -> Rest:
    batch, num_heads, group, dim = weighed.shift.shape
    out, lse = torch.empty_like(weighed.shift), torch.empty_like(weighed.whole)
    kernel = take_off(DIM=dim, GROUP=group, THREADS=threads)
    launch(kernel, (num_heads, batch), threads, *weighed, chosen, mean, np.float32(LEAST), out, lse)
    return Rest(out, lse)


@cuda.jit(device=True)
def sum_parts(sums, lane, thread, exchange):
    """The logarithm of the mass in all parts [parts, 3] and the count, for every lane of a warp.

    All warps must get here.
    """
    top, mass, count = NOTHING, np.float32(0), np.float32(0)
    for part in range(lane, sums.shape[0], WARP):
        top, mass = joined(top, mass, sums[part, 0], sums[part, 1])
        count += sums[part, 2]
    step = WARP // 2
    while step > 0:
        other_top = exchanged(top, exchange, thread, step)
        other_mass = exchanged(mass, exchange, thread, step)
        top, mass = joined(top, mass, other_top, other_mass)
        count += exchanged(count, exchange, thread, step)
        step //= 2
    return (np.float32(top + math.log(mass)) if mass > 0 else NOTHING), count


@cuda.jit(device=True)
def below(x):
    """The share of a normal distribution below x, never 0."""
    return np.float32(np.float32(0.5) * math.erfc(-max(x, -FARTHEST) * ROOT_HALF))


@cuda.jit(device=True)
def density(x):
    return np.float32(DENSITY * math.exp(np.float32(-0.5) * x * x))


@cuda.jit(device=True)
def quantile_above(share):
    """Where a normal distribution has this share above, 0 < share < 1.

    Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 26.2.23, and a step of Newton's method.
    """
    small = min(share, np.float32(1) - share)
    t = np.float32(math.sqrt(np.float32(-2) * math.log(small)))
    above = np.float32(2.515517) + t * (np.float32(0.802853) + t * np.float32(0.010328))
    under = np.float32(1) + t * (np.float32(1.432788) + t * (np.float32(0.189269) + t * np.float32(0.001308)))
    z = np.float32(t - above / under)
    z = np.float32(z + (below(-z) - small) / density(z))
    return z if share <= np.float32(0.5) else -z


@cuda.jit(device=True)
def log_beyond(candidates, mean, taken, length):
    """As in `naive.py`."""
    target, z = np.float32(candidates - math.log(length) - mean), quantile_above(taken)
    deviation = np.float32(math.sqrt(np.float32(2) * max(np.float32(target - math.log(taken)), np.float32(0))))
    for _ in range(NEWTON_STEPS):
        share = below(deviation - z)
        slope = density(deviation - z) / share
        too_large = np.float32(0.5) * deviation * deviation + math.log(share) - target
        deviation = np.float32(max(np.float32(deviation - too_large / (deviation + slope)), np.float32(0)))
    return np.float32(candidates + math.log(below(z - deviation)) - math.log(below(deviation - z)))


@template
def weigh(heads, candidates, lengths, offset, slopes, scaling, whole, beyond, shift):
    """A thread has some of a column's entries, which it multiplies with every head's; then the parts are added.

    The warps of the first block weigh, a head each.
    """
    query = cuda.shared.array(GROUP * DIM, np.float32)
    sums = cuda.shared.array(PARTS * GROUP * COLUMNS, np.float32)
    exchange = cuda.shared.array(THREADS, np.float32)
    thread, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    column, part, first = thread % COLUMNS, thread // COLUMNS, cuda.blockIdx.x * COLUMNS
    own = min(first + column, DIM - 1)
    for i in static(ROUNDS):
        entry[i] = slopes[b, h, min(part + i * PARTS, DIM - 1), own]
    loads_first()
    for i in range(thread, GROUP * DIM, THREADS):
        query[i] = load(heads[b, h, i // DIM, i % DIM]) * scaling
    if cuda.blockIdx.x == 0:
        length = np.float32(lengths[b])
        # The same number of rounds for all warps; those without a head of their own look at the last one again.
        for start in range(0, GROUP, THREADS // WARP):
            g = min(start + thread // WARP, GROUP - 1)
            mass, taken = sum_parts(candidates[b, h, g], thread % WARP, thread, exchange)
            outside = NOTHING
            if HAS_OFFSET and mass > NOTHING and taken > 0 and taken < length:
                outside = log_beyond(mass, offset[b, h, g] * scaling, taken / length, length)
            if thread % WARP == 0:
                whole[b, h, g], beyond[b, h, g] = mass, outside
    cuda.syncthreads()
    for g in static(GROUP):
        sum_of[g] = np.float32(0)
    for i in static(ROUNDS):
        d = part + i * PARTS
        if d < DIM:
            for g in static(GROUP):
                sum_of[g] += entry[i] * query[g * DIM + d]
    for g in static(GROUP):
        sums[(part * GROUP + g) * COLUMNS + column] = sum_of[g]
    cuda.syncthreads()
    for i in range(thread, GROUP * COLUMNS, THREADS):
        d = first + i % COLUMNS
        if d < DIM:
            total = np.float32(0)
            for p in range(PARTS):
                total += sums[p * GROUP * COLUMNS + i]
            shift[b, h, i // COLUMNS, d] = total


@template
def take_off(whole, beyond, shift, chosen, mean, least, out, lse):
    """A block for each key/value head: a warp for each query head weighs, then all write."""
    exchange = cuda.shared.array(THREADS, np.float32)
    share_of_lost = cuda.shared.array(GROUP, np.float32)
    thread, h, b = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    for start in range(0, GROUP, THREADS // WARP):
        g = min(start + thread // WARP, GROUP - 1)
        kept, _ = sum_parts(chosen[b, h, g], thread % WARP, thread, exchange)
        mass, missing = whole[b, h, g], np.float32(0)
        if mass > NOTHING:
            missing = np.float32(-math.expm1(kept - mass))
        total, share = NOTHING, np.float32(0)
        if missing >= least:
            lost = np.float32(mass + math.log(missing))
            # exp(beyond - lost) is 1 at most.
            more = np.float32(1) + np.float32(math.exp(min(np.float32(beyond[b, h, g] - lost), np.float32(0))))
            total, share = np.float32(lost + math.log(more)), np.float32(1) / more
        if thread % WARP == 0:
            share_of_lost[g], lse[b, h, g] = share, total
    cuda.syncthreads()
    for i in range(thread, GROUP * DIM, THREADS):
        g, d = i // DIM, i % DIM
        out[b, h, g, d] = mean[b, h, d] + share_of_lost[g] * shift[b, h, g, d]
