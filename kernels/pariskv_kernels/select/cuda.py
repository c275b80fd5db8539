"""`select_by_votes` and `select_by_scores` on a GPU: exact, ties to the lower place, results in order.

A histogram gives the lowest level that is taken. Then every tile counts what it takes (`count_taken`), so that it
can give every taken element its place (`place_taken`): nothing depends on the order in which threads run.
Levels are the votes themselves, or the first 12 bits of the scores; of the scores in the level that is cut
through, `best_scores` tells apart the few that are left.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.collide.naive import Votes
from pariskv_kernels.device import loads_first, scan
from pariskv_kernels.launch import blocks_for, launch, multiprocessors
from pariskv_kernels.specialise import static, template

WORDS = 4
"""Words that a thread looks at."""

LEVELS, DIGIT = 4096, 1024
"""12 + 10 + 10 bits of a score."""

THRESHOLD, PLACED, TIES, NEEDED = range(4)
"""What is taken of a row: everything above the threshold and the first ties, `placed` elements in all; of the
lowest level `needed` are wanted."""


def select_by_votes(votes: Votes, count: Tensor, lengths: Tensor, width: int, threads: int = 256) -> Tensor:
    batch, heads, num_tokens = votes.votes.shape
    out = torch.empty(batch, heads, width, dtype=torch.int32, device=votes.votes.device)
    if num_tokens == 0:
        return out.fill_(-1)
    keys = 8 if votes.votes.dtype == torch.uint8 and num_tokens % 8 == 0 else 1
    words = votes.votes.view(torch.int64) if keys == 8 else votes.votes
    _take(words, lengths, votes.histogram, count, width, out, {"KEYS": keys, "SCORES": False, "THREADS": threads})
    return out


def select_by_scores(
    scores: Tensor, candidates: Tensor, width: int, count: Tensor | None, threads: int = 256
) -> Tensor:
    batch, heads, num = scores.shape
    device = scores.device
    out = torch.empty(batch, heads, width, dtype=torch.int32, device=device)
    if num == 0:
        return out.fill_(-1)
    levels = torch.zeros(batch, heads, LEVELS, dtype=torch.int32, device=device)
    fill = blocks_for(2 * multiprocessors(device), batch * heads)
    grid = (min(fill, blocks_for(num, threads)), heads, batch)
    launch(count_levels(LEVELS=LEVELS), grid, threads, scores, candidates, levels)
    survivors = torch.empty(batch, heads, num, dtype=torch.int32, device=device)
    wanted = _all_of(width, batch, device) if count is None else count
    constants = {"KEYS": 1, "SCORES": True, "THREADS": threads}
    taken = _take(scores, candidates, levels, wanted, width, survivors, constants)
    final = best_scores(THREADS=2 * threads, DIGIT=DIGIT, LEVELS=LEVELS)
    launch(final, (heads, batch), 2 * threads, scores, candidates, survivors, taken, out)
    return out


@lru_cache
def _all_of(width: int, batch: int, device: torch.device) -> Tensor:
    return torch.full((batch,), width, dtype=torch.int32, device=device)


def _take(
    words: Tensor, valid: Tensor, histogram: Tensor, count: Tensor, width: int, out: Tensor, constants: dict[str, int]
) -> Tensor:
    """Write what is taken of every row, at most `width` and the rest of the lowest level, in order into out.

    words    votes or scores; valid: the rows' lengths [B], or the candidates [B, H, C]
    returns  int32 [B, H, 4 + 2 x tiles], what is taken of a row (see THRESHOLD) and by each tile
    """
    batch, heads, num_words = words.shape
    tiles = blocks_for(num_words, WORDS * constants["THREADS"])
    taken = torch.empty(batch, heads, 4 + 2 * tiles, dtype=torch.int32, device=words.device)
    grid, threads = (tiles, heads, batch), constants["THREADS"]
    counting = count_taken(**constants, WORDS=WORDS)
    launch(counting, grid, threads, words, valid, histogram, count, taken, width)
    launch(place_taken(**constants, WORDS=WORDS), grid, threads, words, valid, taken, out)
    return taken


@cuda.jit(device=True)
def order_of(score):
    """An unsigned number that orders like the score; NaN like -inf."""
    if score != score:
        score = np.float32(-math.inf)
    if score == 0:
        score = np.float32(0)  # -0 ties with 0
    bits = score.view(np.uint32)
    return np.uint32(~bits) if bits >> np.uint32(31) else np.uint32(bits | np.uint32(0x80000000))


@cuda.jit(device=True)
def level_of(score, candidate):
    """The first 12 bits of the score's order, -1 for an empty place."""
    return int(order_of(score) >> np.uint32(20)) if candidate >= 0 else -1


@template
def count_levels(scores, candidates, levels):
    """How many candidates have each level."""
    bins = cuda.shared.array(LEVELS, np.int32)
    thread, threads = cuda.threadIdx.x & 1023, cuda.blockDim.x & 2047
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    for i in range(thread, LEVELS, threads):
        bins[i] = 0
    cuda.syncthreads()
    for c in range(cuda.blockIdx.x * threads + thread, scores.shape[2], cuda.gridDim.x * threads):
        level = level_of(scores[b, h, c], candidates[b, h, c])
        if level >= 0:
            cuda.atomic.add(bins, level, 1)
    cuda.syncthreads()
    for i in range(thread, LEVELS, threads):
        if bins[i] > 0:
            cuda.atomic.add(levels, (b, h, i), bins[i])


@cuda.jit(device=True)
def lowest_taken(bins, wanted, sums, found, thread, threads):
    """found[0]: the highest bin with `wanted` elements in it and above; found[1]: how many lie above it;
    found[2]: how many there are to take, at most wanted. Of nothing the bin is past the last.

    bins    counts of one row; sums int32 [threads], found int32 [3], shared
    """
    size = bins.shape[0]
    share = (size + threads - 1) // threads
    last = max(size - thread * share, 0)  # thread 0 has the highest bins
    first = max(last - share, 0)
    mine = 0
    for i in range(first, last):
        mine += bins[i]
    sums[thread] = mine
    if thread == 0:
        found[0], found[1] = size, 0
    upto = scan(sums, thread, threads)
    wanted = min(wanted, sums[threads - 1])
    above = upto - mine
    if above < wanted and upto >= wanted:
        i = last - 1
        while above + bins[i] < wanted:
            above += bins[i]
            i -= 1
        found[0], found[1] = i, above
    if thread == 0:
        found[2] = wanted
    cuda.syncthreads()


@template
def count_taken(words, valid, histogram, count, taken, width):
    """How many elements of each tile lie above the threshold, and on it."""
    sums = cuda.shared.array(THREADS, np.int32)
    found = cuda.shared.array(3, np.int32)
    thread, tile = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 0x7FFFFFFF
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    bins = histogram[b, h]
    lowest_taken(bins, min(count[b], width), sums, found, thread, THREADS)
    threshold, above, wanted = found[0], found[1], found[2]
    if tile == 0 and thread == 0:
        taken[b, h, 1] = wanted
        taken[b, h, 2] = wanted - above
        taken[b, h, 3] = wanted - above
        if SCORES and wanted > 0:
            taken[b, h, 1] = above + bins[threshold]
            taken[b, h, 2] = 0
    if SCORES:
        threshold -= 1  # the level that is cut through is kept whole
    if tile == 0 and thread == 0:
        taken[b, h, 0] = threshold
    row = words[b, h]
    first = (tile * THREADS + thread) * WORDS
    length = row.shape[0] * KEYS if SCORES else min(valid[b], row.shape[0] * KEYS)
    for i in static(WORDS):
        at[i] = np.uint32(min(first + i, row.shape[0] - 1))
        word[i] = row[at[i]]
        if SCORES:
            candidate[i] = valid[b, h, at[i]]
    loads_first()
    above_and_ties = 0  # in 16 bits each
    for i in static(WORDS):
        for k in static(KEYS):
            if SCORES:
                level = level_of(word[i], candidate[i])
            else:
                level = int(word[i] >> 8 * k) & 255 if KEYS == 8 else int(word[i])
            if (first + i) * KEYS + k < length:
                above_and_ties += (level > threshold) + ((level == threshold) << 16)
    sums[thread] = above_and_ties
    scan(sums, thread, THREADS)
    if thread == 0:
        taken[b, h, 4 + 2 * tile] = sums[THREADS - 1] & 0xFFFF
        taken[b, h, 5 + 2 * tile] = sums[THREADS - 1] >> 16


@template
def place_taken(words, valid, taken, out):
    """Positions above the threshold and the first ties, in order; the rest of the row is -1."""
    sums = cuda.shared.array(THREADS, np.int32)
    ties = cuda.shared.array(THREADS, np.int32)
    thread, tile = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 0x7FFFFFFF
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    threshold, placed, wanted_ties = taken[b, h, 0], taken[b, h, 1], taken[b, h, 2]
    row, chosen = words[b, h], out[b, h]
    first = (tile * THREADS + thread) * WORDS
    for i in static(WORDS):
        at[i] = np.uint32(min(first + i, row.shape[0] - 1))
        word[i] = row[at[i]]
        if SCORES:
            candidate[i] = valid[b, h, at[i]]
    loads_first()
    for place in range(placed + tile * THREADS + thread, out.shape[2], cuda.gridDim.x * THREADS):
        out[b, h, place] = -1

    # What earlier tiles hold.
    more_before, ties_before = 0, 0
    for earlier in range(thread, tile, THREADS):
        more_before += taken[b, h, 4 + 2 * earlier]
        ties_before += taken[b, h, 5 + 2 * earlier]
    sums[thread], ties[thread] = more_before, ties_before
    scan(sums, thread, THREADS)
    scan(ties, thread, THREADS)
    more_before, ties_before = sums[THREADS - 1], ties[THREADS - 1]
    cuda.syncthreads()

    # What earlier threads hold.
    length = row.shape[0] * KEYS if SCORES else min(valid[b], row.shape[0] * KEYS)
    above_and_ties = 0
    for i in static(WORDS):
        for k in static(KEYS):
            level[i * KEYS + k] = -1
            if (first + i) * KEYS + k < length:
                if SCORES:
                    level[i * KEYS + k] = level_of(word[i], candidate[i])
                else:
                    level[i * KEYS + k] = int(word[i] >> 8 * k) & 255 if KEYS == 8 else int(word[i])
                above_and_ties += (level[i * KEYS + k] > threshold) + ((level[i * KEYS + k] == threshold) << 16)
    sums[thread] = above_and_ties
    before = scan(sums, thread, THREADS) - above_and_ties
    more_before += before & 0xFFFF
    ties_before += before >> 16
    if above_and_ties > 0:
        for i in static(WORDS * KEYS):
            place = more_before + min(ties_before, wanted_ties)
            if level[i] > threshold:
                chosen[np.uint32(place)] = first * KEYS + i
                more_before += 1
            elif level[i] == threshold and level[i] >= 0:
                if ties_before < wanted_ties:
                    chosen[np.uint32(place)] = first * KEYS + i
                ties_before += 1


@template
def best_scores(scores, candidates, survivors, taken, out):
    """One block for each row: of the survivors, those above the level that was cut through, and the best of it."""
    bins = cuda.shared.array(DIGIT, np.int32)
    sums = cuda.shared.array(THREADS, np.int32)
    ties = cuda.shared.array(THREADS, np.int32)
    found = cuda.shared.array(3, np.int32)
    thread, h, b = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 65535, cuda.blockIdx.y & 65535
    cut, num, needed = taken[b, h, 0] + 1, taken[b, h, 1], taken[b, h, 3]
    row = scores[b, h]

    # The order of the last one taken, bit by bit: 12 bits are known, 10 + 10 follow.
    last = np.uint32(cut << 20) if cut < LEVELS else np.uint32(0)
    for digit in range(2):
        shift, known = (10, 20) if digit == 0 else (0, 10)
        for i in range(thread, DIGIT, THREADS):
            bins[i] = 0
        cuda.syncthreads()
        for i in range(thread, num, THREADS):
            order = order_of(row[survivors[b, h, i]])
            if order >> np.uint32(known) == last >> np.uint32(known):
                cuda.atomic.add(bins, int(order >> np.uint32(shift)) & (DIGIT - 1), 1)
        cuda.syncthreads()
        lowest_taken(bins, needed, sums, found, thread, THREADS)
        if needed > 0:
            last = np.uint32(last | np.uint32(found[0] << shift))
        needed -= found[1]
        cuda.syncthreads()

    # Every thread has a stretch of its own; places follow from what the stretches before it take.
    stretch = (num + THREADS - 1) // THREADS
    start, stop = min(thread * stretch, num), min((thread + 1) * stretch, num)
    more, equal = 0, 0
    for i in range(start, stop):
        order = order_of(row[survivors[b, h, i]])
        more += order > last
        equal += order == last
    sums[thread], ties[thread] = more, equal
    more = scan(sums, thread, THREADS) - more
    equal = scan(ties, thread, THREADS) - equal
    for i in range(start, stop):
        c = survivors[b, h, i]
        order = order_of(row[c])
        if order > last:
            out[b, h, more + min(equal, needed)] = candidates[b, h, c]
            more += 1
        elif order == last:
            if equal < needed:
                out[b, h, more + equal] = candidates[b, h, c]
            equal += 1
    total = sums[THREADS - 1] + min(ties[THREADS - 1], needed)
    for place in range(total + thread, out.shape[2], THREADS):
        out[b, h, place] = -1
