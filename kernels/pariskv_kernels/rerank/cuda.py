"""`estimate_scores` on a GPU: a thread for each candidate, products q_j x level looked up in shared memory.

A candidate's codes lie side by side, and candidates anywhere. So the threads of a block bring the codes of all its
candidates to shared memory together, neighbours reading neighbouring words; then each thread takes its own.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import fp16_to_float, loads_first
from pariskv_kernels.launch import blocks_for, launch, multiprocessors
from pariskv_kernels.quantizer import level_table
from pariskv_kernels.specialise import static, template

SHARED = 48 << 10
"""Bytes of shared memory that a block can have."""

BLOCKS_PER_MULTIPROCESSOR = 8

NOTHING = np.float32(-math.inf)


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, threads: int = 256) -> Tensor:
    batch, heads, padded = rotated.shape
    num, tokens, subspaces = indices.shape[2], codes.shape[2], weights.shape[3]
    word = torch.int64 if padded % 16 == 0 and subspaces % 4 == 0 else torch.int32
    code_words, weight_words = padded // (2 * word.itemsize), subspaces * 2 // word.itemsize
    row = (code_words + weight_words) | 1  # an odd number of words: threads side by side meet different banks
    while threads * (row * word.itemsize + 4) + padded * 64 > SHARED:
        threads //= 2
    kernel = estimate(
        PADDED=padded,
        M=padded // subspaces,
        BYTES=word.itemsize,
        CODE_WORDS=code_words,
        WEIGHT_WORDS=weight_words,
        ROW=row,
        THREADS=threads,
        word=np.uint64 if word.itemsize == 8 else np.uint32,
    )
    fill = blocks_for(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(rotated.device), batch * heads)
    grid = min(fill, blocks_for(num, threads)), heads, batch
    scores = torch.empty(indices.shape, dtype=torch.float32, device=rotated.device)
    levels = scaled_levels(padded, padded // subspaces, rotated.device)
    in_words = codes.view(word).view(-1), weights.view(word).view(-1)
    launch(kernel, grid, threads, rotated, *in_words, indices, levels, scores, tokens)
    return scores


@lru_cache
def scaled_levels(padded: int, subspace_dim: int, device: torch.device) -> Tensor:
    """What a code stands for in an estimate of products of so many coordinates: [16] float32."""
    return level_table(subspace_dim, device) / math.sqrt(padded)


@template
def estimate(rotated, codes, weights, indices, levels, scores, tokens):
    """codes [B, H, tokens, CODE_WORDS] and weights [B, H, tokens, WEIGHT_WORDS], words of BYTES bytes.

    Both lie in a line, and are indexed by unsigned numbers: Numba would test others for being negative.
    """
    table = cuda.shared.array(PADDED * 16, np.float32)
    staged = cuda.shared.array(THREADS * ROW, word)  # each candidate's codes, then its weights
    position = cuda.shared.array(THREADS, np.int32)
    thread = np.uint32(cuda.threadIdx.x)
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    queries, candidates, out = rotated[b, h], indices[b, h], scores[b, h]
    first_row = np.uint64(b * cuda.gridDim.y + h) * np.uint64(tokens)
    num, start = np.uint32(indices.shape[2]), np.uint32(cuda.blockIdx.x) * np.uint32(THREADS)
    n = candidates[min(start + thread, num - np.uint32(1))]  # past the end the last candidate again
    level = levels[thread & np.uint32(15)]
    for i in static((PADDED * 16 + THREADS - 1) // THREADS):
        coordinate[i] = queries[min(np.uint32(thread + np.uint32(i * THREADS)) >> np.uint32(4), np.uint32(PADDED - 1))]
    for i in static((PADDED * 16 + THREADS - 1) // THREADS):
        if np.uint32(thread + np.uint32(i * THREADS)) < np.uint32(PADDED * 16):
            table[np.uint32(thread + np.uint32(i * THREADS))] = coordinate[i] * level
    while start < num:
        cuda.syncthreads()  # the round before is done with what is shared
        position[thread] = max(n, 0)
        cuda.syncthreads()
        for i in static(CODE_WORDS):
            at = np.uint32(thread + np.uint32(i * THREADS))
            row = first_row + np.uint64(position[at // np.uint32(CODE_WORDS)])
            code[i] = codes[row * np.uint64(CODE_WORDS) + np.uint64(at % np.uint32(CODE_WORDS))]
        for i in static(WEIGHT_WORDS):
            at = np.uint32(thread + np.uint32(i * THREADS))
            row = first_row + np.uint64(position[at // np.uint32(WEIGHT_WORDS)])
            weight[i] = weights[row * np.uint64(WEIGHT_WORDS) + np.uint64(at % np.uint32(WEIGHT_WORDS))]
        loads_first()
        for i in static(CODE_WORDS):
            at = np.uint32(thread + np.uint32(i * THREADS))
            staged[at // np.uint32(CODE_WORDS) * np.uint32(ROW) + at % np.uint32(CODE_WORDS)] = code[i]
        for i in static(WEIGHT_WORDS):
            at = np.uint32(thread + np.uint32(i * THREADS))
            to = at // np.uint32(WEIGHT_WORDS) * np.uint32(ROW) + at % np.uint32(WEIGHT_WORDS)
            staged[to + np.uint32(CODE_WORDS)] = weight[i]
        cuda.syncthreads()
        mine = thread * np.uint32(ROW)
        score = np.float32(0)
        for s in static(PADDED // M):
            block = np.float32(0)
            # The codes of one subspace as a number of 32 bits.
            part = np.uint32(staged[mine + np.uint32(s * M // (2 * BYTES))] >> word(4 * (s * M % (2 * BYTES))))
            for j in static(M):
                nibble = np.uint32(part >> np.uint32(4 * j) & np.uint32(15))
                block += table[np.uint32(nibble + np.uint32((s * M + j) * 16))]
            two = staged[mine + np.uint32(CODE_WORDS + 2 * s // BYTES)] >> word(16 * (s % (BYTES // 2)))
            score += fp16_to_float(np.int32(two & word(0xFFFF))) * block
        if start + thread < num:
            out[start + thread] = score if n >= 0 else NOTHING
        start = np.uint32(start + cuda.gridDim.x * np.uint32(THREADS))
        n = candidates[min(start + thread, num - np.uint32(1))]
