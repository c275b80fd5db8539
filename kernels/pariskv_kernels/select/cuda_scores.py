"""`select_by_scores` on a GPU: exact, equal scores to the earlier candidate, results in order.

A block finds the best of a part of a row; where a row has several parts, the best of each go on to another round.
Within a part, where few are wanted, the best of each thread's candidates give a bound that few others reach, and these
are compared with one another. Else a histogram over the range of the scores gives the level that is cut through:
everything above is taken, and the elements of that level are compared, or the range is narrowed to it while they are
too many for that.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import block_max, scan
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.select import naive
from pariskv_kernels.select.cuda import lowest_taken
from pariskv_kernels.specialise import static, template

ITEMS = 16
"""Candidates of a thread, at most."""

LEVELS = 2048

RIVALS = 1024
"""Elements of one level that are compared with one another, at most."""

LARGEST = np.float32(3.4028235e38)
HALF = np.float32(0.5)  # half of a score: the difference of two is finite


def select_by_scores(
    scores: Tensor,
    candidates: Tensor,
    width: int,
    count: Tensor | None,
    least: float = -math.inf,
    threads: int = 1024,
    levels: int = LEVELS,
) -> Tensor:
    """threads  a power of two

    Of several parts not all that is wanted may fit into one: then the definition does it, which asks the host nothing.
    """
    batch, heads, num = scores.shape
    device = scores.device
    out = torch.empty(batch, heads, width, dtype=torch.int32, device=device)
    if num == 0 or width == 0:
        return out.fill_(-1)
    all_of_them, floor = _all_of(width, batch, device), np.float32(least)
    constants = {"THREADS": threads, "LEVELS": levels, "RIVALS": min(RIVALS, threads)}
    if num > threads * ITEMS and width > threads * ITEMS // 2:
        return naive.select_by_scores(scores, candidates, width, count, least)
    while num > threads * ITEMS:
        items = max(2, _power_of_two(min(ITEMS, 4 * blocks_for(width, threads))))
        parts = blocks_for(num, threads * items)
        better = torch.empty(batch, heads, parts, width, device=device)
        better_candidates = torch.empty(better.shape, dtype=torch.int32, device=device)
        kernel = best_of_part(**constants, ITEMS=items, GOES_ON=True)
        launch(
            kernel, (parts, heads, batch), threads, scores, candidates, all_of_them, floor, better, better_candidates
        )
        scores, candidates, num = better.flatten(2), better_candidates.flatten(2), parts * width
    kernel = best_of_part(**constants, ITEMS=_power_of_two(blocks_for(num, threads)), GOES_ON=False)
    wanted = all_of_them if count is None else count
    whole = scores.unsqueeze(2), out.unsqueeze(2)
    launch(kernel, (1, heads, batch), threads, scores, candidates, wanted, floor, *whole)
    return out


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


@lru_cache
def _all_of(width: int, batch: int, device: torch.device) -> Tensor:
    return torch.full((batch,), width, dtype=torch.int32, device=device)


EMPTY = np.int32(-0x80000000)
"""The order of an empty place, before that of every score."""


@cuda.jit(device=True)
def order_of(score):
    """An int32 that orders like the score; NaN like -inf, -0 like 0."""
    if score != score:
        score = np.float32(-np.inf)
    if score == 0:
        score = np.float32(0)
    bits = score.view(np.int32)
    return bits if bits >= 0 else np.int32(bits ^ np.int32(0x7FFFFFFF))


@cuda.jit(device=True)
def half_of(order):
    """Half of the score that has this order, kept finite."""
    bits = order if order >= 0 else np.int32(order ^ np.int32(0x7FFFFFFF))
    return min(max(np.int32(bits).view(np.float32), -LARGEST), LARGEST) * HALF


@cuda.jit(device=True)
def step_of(low, high, levels):
    """The factor that spreads the scores between two orders over the levels."""
    width = half_of(high) - half_of(low)
    return min(np.float32(levels - 1) / width, LARGEST) if width > 0 else np.float32(0)


@cuda.jit(device=True)
def level_of(order, low, factor, shift, levels):
    """Where an order lies in the range that begins at `low`: by the score's value, or by its bits (shift >= 0)."""
    if shift >= 0:
        return np.int32(np.uint32(np.uint32(order) - np.uint32(low)) >> np.uint32(shift))
    return np.int32(min((half_of(order) - half_of(low)) * factor, np.float32(levels - 1)))


@template
def best_of_part(scores, candidates, count, least, better, out):
    """The best `count[b]`, at most the width, of the candidates of one part of a row whose score is not below `least`.

    out     int32 [B, H, parts, width], in order, then -1; better  float32, their scores, where it GOES_ON
    """
    bins = cuda.shared.array(LEVELS, np.int32)
    sums = cuda.shared.array(THREADS, np.int32)
    warps = cuda.shared.array(32, np.int32)
    found = cuda.shared.array(3, np.int32)
    rival = cuda.shared.array(RIVALS, np.int64)  # an element's order, then how early it stands
    taken = cuda.shared.array(THREADS * ITEMS // 32, np.uint32)  # a bit for each element
    tied = cuda.shared.array(THREADS * ITEMS // 32, np.uint32)
    num_rivals = cuda.shared.array(1, np.int32)
    thread, part = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 0x7FFFFFFF
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    first, num, width = part * (THREADS * ITEMS), scores.shape[2], out.shape[3]

    for i in static(ITEMS):
        at = np.uint32(min(first + i * THREADS + thread, num - 1))
        score[i] = scores[b, h, at]
        candidate[i] = candidates[b, h, at]
    needed = np.int32(min(count[b], width))
    top, bottom, lowest = EMPTY, EMPTY, np.int32(order_of(least))
    for i in static(ITEMS):
        order[i] = np.int32(order_of(score[i]))
        if candidate[i] < 0 or first + i * THREADS + thread >= num or order[i] < lowest:
            order[i] = EMPTY
        else:
            bottom = np.int32(max(bottom, ~order[i]))
        top = np.int32(max(top, order[i]))
    if thread < THREADS * ITEMS // 32:
        taken[thread], tied[thread] = 0, 0
    high = block_max(top, warps, thread, THREADS)

    # Among the threads' best, the last one wanted: as many as are wanted reach it, and hardly any more.
    shift, low = np.int32(-1), EMPTY
    if 0 < needed <= THREADS // 4:
        lowest_top = ~block_max(~top if top != EMPTY else EMPTY, warps, thread, THREADS)
        for i in range(thread, LEVELS, THREADS):
            bins[i] = 0
        cuda.syncthreads()
        factor = step_of(lowest_top, high, LEVELS)
        level = np.int32(-1)
        if top != EMPTY:
            level = level_of(top, lowest_top, factor, shift, LEVELS)
            cuda.atomic.add(bins, level, 1)
        cuda.syncthreads()
        lowest_taken(bins, needed, sums, found, thread, THREADS)
        if found[2] == needed:
            low = ~block_max(~top if level >= found[0] else EMPTY, warps, thread, THREADS)
    is_settled = False
    if low != EMPTY:
        if thread == 0:
            num_rivals[0] = 0
        cuda.syncthreads()
        for i in static(ITEMS):
            if order[i] >= low:
                at = cuda.atomic.add(num_rivals, 0, 1)
                if at < RIVALS:
                    rival[at] = np.int64(order[i]) << 16 | (0xFFFF - (i * THREADS + thread))
        cuda.syncthreads()
        is_settled = num_rivals[0] <= RIVALS
        cuda.syncthreads()  # before the number changes, everybody has seen it
    else:
        low = ~block_max(bottom, warps, thread, THREADS)
    while not is_settled:
        for i in range(thread, LEVELS, THREADS):
            bins[i] = 0
        if thread == 0:
            num_rivals[0] = 0
        cuda.syncthreads()
        factor = step_of(low, high, LEVELS)
        for i in static(ITEMS):
            if low <= order[i] <= high:
                cuda.atomic.add(bins, level_of(order[i], low, factor, shift, LEVELS), 1)
        cuda.syncthreads()
        lowest_taken(bins, needed, sums, found, thread, THREADS)
        cut, needed = found[0], np.int32(found[2] - found[1])
        in_level = bins[cut] if needed > 0 else 0
        is_settled = in_level == needed or in_level <= RIVALS
        top, bottom = EMPTY, EMPTY
        for i in static(ITEMS):
            if low <= order[i] <= high:
                level = level_of(order[i], low, factor, shift, LEVELS)
                place = i * THREADS + thread
                if level > cut or (level == cut and in_level == needed):
                    cuda.atomic.or_(taken, place // 32, np.uint32(1) << np.uint32(place & 31))
                elif level == cut and is_settled:
                    rival[cuda.atomic.add(num_rivals, 0, 1)] = np.int64(order[i]) << 16 | (0xFFFF - place)
                elif level == cut:
                    top, bottom = np.int32(max(top, order[i])), np.int32(max(bottom, ~order[i]))
        if not is_settled:
            high, low = block_max(top, warps, thread, THREADS), ~block_max(bottom, warps, thread, THREADS)
            shift = np.int32(0)
            while np.uint32(np.uint32(high) - np.uint32(low)) >> np.uint32(shift) >= LEVELS:
                shift = np.int32(shift + 1)
            if high == low:
                is_settled = True
                for i in static(ITEMS):
                    if order[i] == high:
                        place = i * THREADS + thread
                        cuda.atomic.or_(tied, place // 32, np.uint32(1) << np.uint32(place & 31))
        cuda.syncthreads()

    # Of those that are compared, the best; none is as good as another, since one stands earlier.
    if thread < num_rivals[0]:
        mine, rank = rival[thread], 0
        for start in range(0, num_rivals[0], 8):
            for i in static(8):  # loads in flight
                other[i] = rival[min(start + i, num_rivals[0] - 1)]
            for i in static(8):
                rank += other[i] > mine and start + i < num_rivals[0]
        if rank < needed:
            place = int(0xFFFF - (mine & 0xFFFF))
            cuda.atomic.or_(taken, place // 32, np.uint32(1) << np.uint32(place & 31))
    cuda.syncthreads()

    # A thread for each word of 32 elements: its place follows from what the words before take.
    bits, ties = np.uint32(0), np.uint32(0)
    if thread < THREADS * ITEMS // 32:
        bits, ties = taken[thread], tied[thread]
    num_bits, num_ties = cuda.popc(bits), cuda.popc(ties)
    sums[thread] = num_bits | num_ties << 16
    before = scan(sums, thread, THREADS)
    ties_before = (before >> 16) - num_ties
    place = (before & 0xFFFF) - num_bits + min(ties_before, needed)
    for _ in range(num_ties - min(num_ties, max(needed - ties_before, 0))):
        ties = np.uint32(ties & ~np.uint32(np.uint32(0x80000000) >> np.uint32(cuda.clz(ties))))
    bits = np.uint32(bits | ties)
    while bits != 0:
        at = np.uint32(first + 32 * thread + cuda.ffs(bits) - 1)
        out[b, h, part, np.uint32(place)] = candidates[b, h, at]
        if GOES_ON:
            better[b, h, part, np.uint32(place)] = scores[b, h, at]
        place += 1
        bits = np.uint32(bits & np.uint32(bits - np.uint32(1)))
    total = sums[THREADS - 1]
    for place in range((total & 0xFFFF) + min(total >> 16, needed) + thread, width, THREADS):
        out[b, h, part, np.uint32(place)] = -1
