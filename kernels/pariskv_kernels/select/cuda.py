"""`select_by_votes` on a GPU: exact, ties to the lower place, results in order. (`select_by_scores`: `cuda_scores.py`.)

The histogram gives the lowest number of votes that is taken. Then every tile counts what it takes (`count_taken`), so
that it can give every taken key its place (`place_taken`): nothing depends on the order in which threads run.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.collide.naive import Votes
from pariskv_kernels.device import loads_first, scan
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

WORDS = 4
"""Words that a thread looks at; at most 32 keys, a bit each."""

THRESHOLD, PLACED, TIES = range(3)
"""What is taken of a row: everything above the threshold and the first ties, `placed` keys in all."""

HIGH = 0x80808080
"""The highest bit of each of four bytes."""


def select_by_votes(votes: Votes, count: Tensor, lengths: Tensor, width: int, threads: int = 256) -> Tensor:
    batch, heads, num_tokens = votes.votes.shape
    device = votes.votes.device
    out = torch.empty(batch, heads, width, dtype=torch.int32, device=device)
    if num_tokens == 0:
        return out.fill_(-1)
    keys = 8 if votes.votes.dtype == torch.uint8 and num_tokens % 8 == 0 else 1
    words = votes.votes.view(torch.int64) if keys == 8 else votes.votes
    tiles = blocks_for(num_tokens, WORDS * keys * threads)
    taken = torch.empty(batch, heads, 3 + tiles, dtype=torch.int32, device=device)
    constants, grid = {"KEYS": keys, "WORDS": WORDS, "THREADS": threads}, (tiles, heads, batch)
    launch(count_taken(**constants), grid, threads, words, lengths, votes.histogram, count, taken, width)
    launch(place_taken(**constants), grid, threads, words, lengths, taken, out)
    return out


@cuda.jit(device=True)
def bytes_at_least(four, level):
    """One bit for each of the four bytes of a word, set where the byte is `level` or more; 256 is more than any."""
    bound = np.uint32(min(level, 255) * 0x01010101)
    # Without its highest bit each byte is compared by a subtraction that borrows from nobody.
    low = np.uint32(np.uint32(four | np.uint32(HIGH)) - np.uint32(bound & np.uint32(0x7F7F7F7F)))
    same = np.uint32(~(four ^ bound) & low)
    high = np.uint32((np.uint32(four & ~bound) | same) & np.uint32(HIGH))
    together = np.uint32(np.uint64(np.uint32(high >> np.uint32(7)) * np.uint64(0x01020408)) >> np.uint64(24))
    return np.uint32(together & np.uint32(15)) if level < 256 else np.uint32(0)


@cuda.jit(device=True)
def first_bits(number):
    """A word whose first `number` bits are set, none for a negative number, all for 32 and more."""
    return np.uint32((np.uint64(1) << np.uint64(min(max(number, 0), 32))) - np.uint64(1))


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
def count_taken(words, lengths, histogram, count, taken, width):
    """How many keys of each tile lie above the threshold (16 bits), and on it (16 bits); with it, see THRESHOLD."""
    sums = cuda.shared.array(THREADS, np.int32)
    found = cuda.shared.array(3, np.int32)
    thread, tile = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 0x7FFFFFFF
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    row = words[b, h]
    first = (tile * THREADS + thread) * WORDS
    for i in static(WORDS):
        word[i] = row[np.uint32(min(first + i, row.shape[0] - 1))]
    loads_first()
    lowest_taken(histogram[b, h], min(count[b], width), sums, found, thread, THREADS)
    threshold = found[0]
    if tile == 0 and thread == 0:
        taken[b, h, 0], taken[b, h, 1], taken[b, h, 2] = threshold, found[2], found[2] - found[1]
    above, ties = np.uint32(0), np.uint32(0)
    for i in static(WORDS):
        if KEYS == 8:
            for half in static(2):
                four = np.uint32(np.uint64(word[i]) >> np.uint64(32 * half))
                more, level = bytes_at_least(four, threshold + 1), bytes_at_least(four, threshold)
                above = np.uint32(above | np.uint32(more << np.uint32(8 * i + 4 * half)))
                ties = np.uint32(ties | np.uint32((level ^ more) << np.uint32(8 * i + 4 * half)))
        else:
            above = np.uint32(above | np.uint32((int(word[i]) > threshold) << i))
            ties = np.uint32(ties | np.uint32((int(word[i]) == threshold) << i))
    valid = first_bits(min(lengths[b], row.shape[0] * KEYS) - first * KEYS)
    sums[thread] = cuda.popc(np.uint32(above & valid)) | cuda.popc(np.uint32(ties & valid)) << 16
    scan(sums, thread, THREADS)
    if thread == 0:
        taken[b, h, 3 + tile] = sums[THREADS - 1]


@template
def place_taken(words, lengths, taken, out):
    """Positions above the threshold and the first ties, in order; the rest of the row is -1."""
    sums = cuda.shared.array(THREADS, np.int32)
    ties_of = cuda.shared.array(THREADS, np.int32)
    thread, tile = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 0x7FFFFFFF
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    row, chosen = words[b, h], out[b, h]
    first = (tile * THREADS + thread) * WORDS
    for i in static(WORDS):
        word[i] = row[np.uint32(min(first + i, row.shape[0] - 1))]
    threshold, placed, wanted_ties = taken[b, h, 0], taken[b, h, 1], taken[b, h, 2]
    # What earlier tiles hold.
    more_before, ties_before = 0, 0
    for earlier in range(thread, tile, THREADS):
        both = taken[b, h, np.uint32(3 + earlier)]
        more_before += both & 0xFFFF
        ties_before += both >> 16
    loads_first()
    above, ties = np.uint32(0), np.uint32(0)
    for i in static(WORDS):
        if KEYS == 8:
            for half in static(2):
                four = np.uint32(np.uint64(word[i]) >> np.uint64(32 * half))
                more, level = bytes_at_least(four, threshold + 1), bytes_at_least(four, threshold)
                above = np.uint32(above | np.uint32(more << np.uint32(8 * i + 4 * half)))
                ties = np.uint32(ties | np.uint32((level ^ more) << np.uint32(8 * i + 4 * half)))
        else:
            above = np.uint32(above | np.uint32((int(word[i]) > threshold) << i))
            ties = np.uint32(ties | np.uint32((int(word[i]) == threshold) << i))
    valid = first_bits(min(lengths[b], row.shape[0] * KEYS) - first * KEYS)
    above, ties = np.uint32(above & valid), np.uint32(ties & valid)
    num_above, num_ties = cuda.popc(above), cuda.popc(ties)
    # Thread 0 brings what the earlier tiles hold into the sums over threads.
    sums[thread], ties_of[thread] = more_before, ties_before
    scan(sums, thread, THREADS)
    scan(ties_of, thread, THREADS)
    more_before, ties_before = sums[THREADS - 1], ties_of[THREADS - 1]
    cuda.syncthreads()
    sums[thread] = num_above | num_ties << 16
    before = scan(sums, thread, THREADS)
    more_before += (before & 0xFFFF) - num_above
    ties_before += (before >> 16) - num_ties

    place = np.uint32(more_before + min(ties_before, wanted_ties))
    for _ in range(num_ties - min(num_ties, max(wanted_ties - ties_before, 0))):
        ties = np.uint32(ties & ~np.uint32(np.uint32(0x80000000) >> np.uint32(cuda.clz(ties))))
    mask = np.uint32(above | ties)
    while mask != 0:
        bit = np.uint32(cuda.ffs(mask) - 1)
        chosen[place] = first * KEYS + bit
        place = np.uint32(place + np.uint32(1))
        mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
    for empty in range(placed + tile * THREADS + thread, out.shape[2], cuda.gridDim.x * THREADS):
        chosen[np.uint32(empty)] = -1
