"""`collide` and `collide_scaled` on a GPU: a thread adds the votes of eight keys that lie side by side.

Two of them share a 32-bit register.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.collide.naive import BINS, Votes, vote_dtype, vote_scale
from pariskv_kernels.device import loads_first
from pariskv_kernels.launch import blocks_for, launch, multiprocessors
from pariskv_kernels.specialise import static, template

COPIES = 8
"""Histograms of a block, so that neighbouring threads seldom add to the same counter."""

BLOCKS_PER_MULTIPROCESSOR = 4

LOADS = 16
"""Subspaces whose patterns are asked for before the first is used."""


def collide(signs: Tensor, table: Tensor, lengths: Tensor, max_weight: int, threads: int = 256) -> Votes:
    bins = signs.shape[2] * max_weight + 1
    return _count(signs, table, lengths, None, None, bins, vote_dtype(bins), threads)


def collide_scaled(
    signs: Tensor, table: Tensor, lengths: Tensor, norms: Tensor | None, max_weight: int, threads: int = 256
) -> Votes:
    scale = vote_scale(signs.shape[2], max_weight, signs.device)
    return _count(signs, table, lengths, norms, scale, BINS, torch.uint8, threads)


def _count(
    signs: Tensor,
    table: Tensor,
    lengths: Tensor,
    norms: Tensor | None,
    scale: Tensor | None,
    bins: int,
    dtype: torch.dtype,
    threads: int,
) -> Votes:
    batch, heads, subspaces, num_tokens = signs.shape
    votes = torch.empty(batch, heads, num_tokens, dtype=dtype, device=signs.device)
    histogram = torch.zeros(batch, heads, bins, dtype=torch.int32, device=signs.device)
    keys = 8 if num_tokens % 8 == 0 else 1
    packed = keys == 8 and votes.dtype == torch.uint8
    constants = {"SUBSPACES": subspaces, "PATTERNS": table.shape[3], "BINS": bins, "COPIES": COPIES}
    constants |= {"SUMS": 0 if scale is None else scale.shape[0], "NORMED": norms is not None}
    kernel = count_votes(**constants, KEYS=keys, PACKED=packed, LOADS=LOADS, THREADS=threads)
    fill = blocks_for(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(signs.device), batch * heads)

    def in_words(row: Tensor) -> Tensor:
        return row.view(torch.int64).view(-1) if keys == 8 else row.view(-1)

    launch(
        kernel,
        (min(fill, blocks_for(num_tokens, keys * threads)), heads, batch),
        threads,
        in_words(signs),
        table.view(torch.int64).view(-1),
        lengths,
        in_words(signs if norms is None else norms),  # not read where NORMED is not set
        histogram if scale is None else scale,  # nor this without SUMS
        in_words(votes) if packed else votes.view(-1),
        histogram,
        num_tokens // keys,
    )
    return Votes(votes, histogram)


@template
def count_votes(signs, table, lengths, norms, scale, votes, histogram, row_words):
    """signs [B, H, S, row_words] of KEYS patterns a word; norms alike; votes likewise where PACKED, else [B, H, N].

    SUMS  entries of scale, where votes are scaled; 0: the votes are the sums of the weights

    All lie in a line, and are indexed by unsigned numbers: Numba would test others for being negative.
    """
    weights = cuda.shared.array(SUBSPACES * PATTERNS, np.uint8)
    bins = cuda.shared.array(BINS * COPIES, np.int32)
    scaled = cuda.shared.array(SUMS + 1, np.uint8)
    thread, threads = np.uint32(cuda.threadIdx.x), np.uint32(THREADS)
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    head = np.uint64(b * cuda.gridDim.y + h)
    for i in static((SUBSPACES * PATTERNS // 8 + THREADS - 1) // THREADS):  # eight weights a load, all at once
        at = min(thread + np.uint32(i * THREADS), np.uint32(SUBSPACES * PATTERNS // 8 - 1))
        eight[i] = np.uint64(table[head * np.uint64(SUBSPACES * PATTERNS // 8) + np.uint64(at)])
    for i in range(thread, np.uint32(BINS * COPIES), threads):
        bins[i] = 0
    if SUMS > 0:
        for i in range(thread, np.uint32(SUMS), threads):
            scaled[i] = scale[i]
    for i in static((SUBSPACES * PATTERNS // 8 + THREADS - 1) // THREADS):
        at = min(thread + np.uint32(i * THREADS), np.uint32(SUBSPACES * PATTERNS // 8 - 1))
        for k in static(8):
            weights[np.uint32(np.uint32(8) * at + np.uint32(k))] = np.uint8(
                eight[i] >> np.uint64(8 * k) & np.uint64(255)
            )
    cuda.syncthreads()
    words = np.uint64(row_words)
    length = np.uint64(min(np.int64(lengths[b]), row_words * KEYS))
    used = (length + np.uint64(KEYS - 1)) // np.uint64(KEYS)
    copy = np.uint32(thread % np.uint32(COPIES))
    # The same number of rounds for all threads of a block; those past the end look at the last word again.
    for start in range(np.uint64(cuda.blockIdx.x) * threads, used, np.uint64(cuda.gridDim.x) * threads):
        w = start + thread
        at = head * np.uint64(SUBSPACES) * words + min(w, used - np.uint64(1))
        for pair in static((KEYS + 1) // 2):
            sums[pair] = np.uint32(0)
        for group in range(max(SUBSPACES // LOADS, 1)):
            for i in static(min(SUBSPACES, LOADS)):
                word[i] = np.uint64(signs[at + np.uint64(group * LOADS + i) * words])
            loads_first()
            for i in static(min(SUBSPACES, LOADS)):
                for pair in static((KEYS + 1) // 2):
                    two = np.uint32(word[i] >> np.uint64(16 * pair))
                    one = np.uint32(np.uint32((group * LOADS + i) * PATTERNS) + (two & np.uint32(PATTERNS - 1)))
                    both = np.uint32(weights[one])
                    if KEYS > 1:
                        other = np.uint32(two >> np.uint32(8) & np.uint32(PATTERNS - 1))
                        other = np.uint32(other + np.uint32((group * LOADS + i) * PATTERNS))
                        both = np.uint32(both | np.uint32(weights[other]) << np.uint32(16))
                    sums[pair] = np.uint32(sums[pair] + both)
        if w < used:
            result = np.uint64(0)
            key = w * np.uint64(KEYS)
            is_whole = key + np.uint64(KEYS) <= length
            if NORMED:
                levels = np.uint64(norms[head * words + w])
            for k in static(KEYS):
                vote = np.uint32(sums[k // 2] >> np.uint32(16 * (k % 2)) & np.uint32(0xFFFF))
                if SUMS > 0:
                    is_above = vote > np.uint32(SUMS // 2)
                    vote = np.uint32(scaled[vote])
                    if NORMED:
                        level = np.uint32(np.uint32(levels >> np.uint64(8 * k)) & np.uint32(255))
                        vote = np.uint32(vote + level) if is_above else vote
                if PACKED:
                    result |= np.uint64(vote) << np.uint64(8 * k)
                else:
                    votes[head * words * np.uint64(KEYS) + key + np.uint64(k)] = vote
                if is_whole or key + np.uint64(k) < length:
                    cuda.atomic.add(bins, np.uint32(vote * np.uint32(COPIES) + copy), 1)
            if PACKED:
                votes[head * words + w] = np.int64(result)
    cuda.syncthreads()
    for i in range(thread, np.uint32(BINS), threads):
        total = 0
        for k in range(COPIES):
            total += bins[i * np.uint32(COPIES) + np.uint32(k)]
        if total > 0:
            cuda.atomic.add(histogram, (b, h, i), total)
