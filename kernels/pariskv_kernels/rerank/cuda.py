"""`estimate_scores` on a GPU: one thread for each candidate, products q_j x level looked up in shared memory."""

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


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, threads: int = 256) -> Tensor:
    batch, heads, padded = rotated.shape
    candidates, subspaces = indices.shape[2], weights.shape[3]
    scores = torch.empty(indices.shape, dtype=torch.float32, device=rotated.device)
    levels = _scaled_levels(padded, padded // subspaces, rotated.device)
    kernel = estimate(
        PADDED=padded,
        M=padded // subspaces,
        CODES=16 if padded % 16 == 0 else 8,
        HALVES=4 if subspaces % 4 == 0 else 2,
    )
    fill = blocks_for(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(rotated.device), batch * heads)
    launch(
        kernel,
        (min(fill, blocks_for(candidates, threads)), heads, batch),
        threads,
        rotated,
        codes.view(torch.int64 if padded % 16 == 0 else torch.int32).view(-1),
        weights.view(torch.int64 if subspaces % 4 == 0 else torch.int32).view(-1),
        indices,
        levels,
        scores,
        codes.shape[2],
    )
    return scores


BLOCKS_PER_MULTIPROCESSOR = 8


@lru_cache
def _scaled_levels(padded: int, subspace_dim: int, device: torch.device) -> Tensor:
    return level_table(subspace_dim, device) / math.sqrt(padded)


@template
def estimate(rotated, codes, weights, indices, levels, scores, tokens):
    """codes [B, H, tokens, P / CODES], CODES coordinates a word; weights [B, H, tokens, S / HALVES].

    Both lie in a line, and are indexed by unsigned numbers: Numba would test others for being negative.
    """
    table = cuda.shared.array(PADDED * 16, np.float32)
    thread, threads = np.uint32(cuda.threadIdx.x), np.uint32(cuda.blockDim.x)
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    queries, candidates, out = rotated[b, h], indices[b, h], scores[b, h]
    for i in range(thread, np.uint32(PADDED * 16), threads):
        table[i] = queries[i >> np.uint32(4)] * levels[i & np.uint32(15)]
    cuda.syncthreads()
    first_row = np.uint64(b * cuda.gridDim.y + h) * np.uint64(tokens)
    num = np.uint32(indices.shape[2])
    # The same number of rounds for all threads of a block; those past the end look at the last candidate again.
    for start in range(np.uint32(cuda.blockIdx.x) * threads, num, cuda.gridDim.x * threads):
        c = start + thread
        n = candidates[min(c, num - np.uint32(1))]
        row = first_row + np.uint64(max(n, 0))
        for w in static(PADDED // CODES):
            word[w] = np.uint64(codes[row * np.uint64(PADDED // CODES) + np.uint64(w)])
        for w in static(PADDED // M // HALVES):
            halves[w] = np.uint64(weights[row * np.uint64(PADDED // M // HALVES) + np.uint64(w)])
        loads_first()
        score = np.float32(0)
        for s in static(PADDED // M):
            block = np.float32(0)
            # The codes of one subspace as a number of 32 bits.
            part = np.uint32(word[s * M // CODES] >> np.uint64(4 * (s * M % CODES)))
            for j in static(M):
                nibble = np.uint32(part >> np.uint32(4 * j) & np.uint32(15))
                block += table[np.uint32(nibble + np.uint32((s * M + j) * 16))]
            half = np.int32(halves[s // HALVES] >> np.uint64(16 * (s % HALVES)) & np.uint64(0xFFFF))
            score += fp16_to_float(half) * block
        if c < num:
            out[c] = score if n >= 0 else np.float32(-math.inf)
