"""`estimate_scores` and `estimate_scores_by_head` on a GPU: a thread for each candidate.

Of one query, products q_j x level are looked up in shared memory; of a group, a coordinate of the key is worked out
once, and multiplied with every head's, of which two are read at a time: shared memory is what the kernel waits for.
On request a block also adds up the exponentials of its scores, while it has them.

A candidate's codes lie side by side, and candidates anywhere. So the threads of a block bring the codes of all its
candidates to shared memory together, neighbours reading neighbouring words; then each thread takes its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import block_max, block_sum, fp16_to_float, loads_first
from pariskv_kernels.launch import blocks_for, launch, multiprocessors
from pariskv_kernels.quantizer import level_table
from pariskv_kernels.specialise import static, template

SHARED = 48 << 10
"""Bytes of shared memory that a block can have."""

BLOCKS_PER_MULTIPROCESSOR = 8

WARPS = 32
"""Warps of a block, at most."""

NOTHING = np.float32(-math.inf)


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, threads: int = 256) -> Tensor:
    scores = torch.empty(indices.shape, dtype=torch.float32, device=rotated.device)
    prepared = _prepare(rotated.shape[2] * 16, rotated, codes, weights, indices, threads)
    prepared.launch(estimate(**prepared.constants), scores)
    return scores


def estimate_scores_by_head(
    rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, threads: int = 256
) -> Tensor:
    return estimate_and_sum(rotated, codes, weights, indices, None, threads=threads)[0]


def estimate_and_sum(
    rotated: Tensor,
    codes: Tensor,
    weights: Tensor,
    indices: Tensor,
    offset: Tensor | None,
    scaling: float = 1.0,
    softcap: float | None = None,
    threads: int = 256,
) -> tuple[Tensor, Tensor]:
    """The estimates, and of each head's scores, scaling x (estimate + offset), soft-capped, what `combine` goes by.

    offset   None: nothing is added up, and the sums hold anything
    returns  [B, H, G, C] and [B, H, G, parts, 2], the highest score of a part and the sum of exp(score - highest)
    """
    batch, heads, group, padded = rotated.shape
    scores = torch.empty(batch, heads, group, indices.shape[2], dtype=torch.float32, device=rotated.device)
    pairs = (group + 1) // 2
    prepared = _prepare(2 * pairs * padded + 16 + WARPS, rotated, codes, weights, indices, threads)
    sums = torch.empty(batch, heads, group, prepared.blocks, 2, dtype=torch.float32, device=rotated.device)
    constants = {"SUMMED": offset is not None, "CAPPED": softcap is not None, "GROUP": group, "PAIRS": pairs}
    kernel = estimate_group(**constants, **prepared.constants)
    numbers = np.float32(scaling), np.float32(softcap or 0)
    prepared.launch(kernel, scores, sums[..., 0, 0] if offset is None else offset, sums, *numbers)
    return scores, sums


@dataclass(frozen=True)
class _Prepared:
    """What both kernels are given: their constants, a grid of `blocks` for each head, and the first arguments."""

    constants: dict[str, Any]
    blocks: int
    arguments: tuple[Any, ...]
    tokens: int

    def launch(self, kernel: Any, *results: Any) -> None:
        batch, heads = self.arguments[0].shape[:2]
        grid = self.blocks, heads, batch
        launch(kernel, grid, self.constants["THREADS"], *self.arguments, *results, self.tokens)


def _prepare(table: int, rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, threads: int) -> _Prepared:
    """table: numbers of 4 bytes in shared memory, beside the candidates' codes."""
    batch, heads, padded = *rotated.shape[:2], rotated.shape[-1]
    candidates, subspaces = indices.shape[2], weights.shape[3]
    levels = _scaled_levels(padded, padded // subspaces, rotated.device)
    word = torch.int64 if padded % 16 == 0 and subspaces % 4 == 0 else torch.int32
    code_words, weight_words = padded // (2 * word.itemsize), subspaces * 2 // word.itemsize
    row = (code_words + weight_words) | 1  # an odd number of words: threads side by side meet different banks
    while threads * (row * word.itemsize + 4) + table * 4 > SHARED:
        threads //= 2
    constants = {
        "PADDED": padded,
        "M": padded // subspaces,
        "BYTES": word.itemsize,
        "CODE_WORDS": code_words,
        "WEIGHT_WORDS": weight_words,
        "ROW": row,
        "THREADS": threads,
        "word": np.uint64 if word.itemsize == 8 else np.uint32,
    }
    fill = blocks_for(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(rotated.device), batch * heads)
    arguments = rotated, codes.view(word).view(-1), weights.view(word).view(-1), indices, levels
    return _Prepared(constants, min(fill, blocks_for(candidates, threads)), arguments, codes.shape[2])


@lru_cache
def _scaled_levels(padded: int, subspace_dim: int, device: torch.device) -> Tensor:
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


@template
def estimate_group(rotated, codes, weights, indices, levels, scores, offset, sums, scaling, softcap, tokens):
    """As `estimate`, with rotated [B, H, GROUP, PADDED] and scores [B, H, GROUP, C]; SUMMED as `estimate_and_sum`."""
    table = cuda.shared.array(16, np.float32)
    query = cuda.shared.array(PADDED * PAIRS, np.uint64)  # two heads' coordinates each
    warps = cuda.shared.array(WARPS, np.float32)
    staged = cuda.shared.array(THREADS * ROW, word)  # each candidate's codes, then its weights
    position = cuda.shared.array(THREADS, np.int32)
    thread = np.uint32(cuda.threadIdx.x)
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    queries, candidates, out = rotated[b, h], indices[b, h], scores[b, h]
    first_row = np.uint64(b * cuda.gridDim.y + h) * np.uint64(tokens)
    num, start = np.uint32(indices.shape[2]), np.uint32(cuda.blockIdx.x) * np.uint32(THREADS)
    n = candidates[min(start + thread, num - np.uint32(1))]  # past the end the last candidate again
    for i in range(thread, np.uint32(16), np.uint32(THREADS)):
        table[i] = levels[i]
    for i in range(thread, np.uint32(PADDED * PAIRS), np.uint32(THREADS)):
        at, one = np.uint32(i // np.uint32(PAIRS)), np.uint32(i % np.uint32(PAIRS) * np.uint32(2))
        both = np.uint64(queries[one, at].view(np.uint32))
        if one + np.uint32(1) < np.uint32(GROUP):
            both |= np.uint64(queries[one + np.uint32(1), at].view(np.uint32)) << np.uint64(32)
        query[i] = both
    for g in static(GROUP):
        highest[g] = NOTHING
        mass[g] = np.float32(0)
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
        for g in static(2 * PAIRS):
            score[g] = np.float32(0)
        for s in range(PADDED // M):
            # The codes of one subspace as a number of 32 bits, and what they are multiplied by.
            first = np.uint32(s * M)
            part = np.uint32(
                staged[mine + first // np.uint32(2 * BYTES)] >> word(np.uint32(4) * (first % np.uint32(2 * BYTES)))
            )
            two = staged[mine + np.uint32(CODE_WORDS) + np.uint32(2 * s) // np.uint32(BYTES)]
            two = two >> word(16 * (s % (BYTES // 2)))
            factor = fp16_to_float(np.int32(two & word(0xFFFF)))
            for j in static(M):
                value = table[np.uint32(part >> np.uint32(4 * j) & np.uint32(15))] * factor
                for pair in static(PAIRS):
                    both = query[np.uint32(np.uint32(first + np.uint32(j)) * np.uint32(PAIRS) + np.uint32(pair))]
                    score[2 * pair] += value * np.uint32(both & np.uint64(0xFFFFFFFF)).view(np.float32)
                    score[2 * pair + 1] += value * np.uint32(both >> np.uint64(32)).view(np.float32)
        if start + thread < num:
            for g in static(GROUP):
                out[g, start + thread] = score[g] if n >= 0 else NOTHING
            if SUMMED and n >= 0:
                for g in static(GROUP):
                    own = np.float32((score[g] + offset[b, h, g]) * scaling)
                    if CAPPED:
                        own = np.float32(softcap * math.tanh(own / softcap))
                    if own > highest[g]:
                        mass[g] = np.float32(mass[g] * math.exp(highest[g] - own) + np.float32(1))
                        highest[g] = own
                    else:
                        mass[g] = np.float32(mass[g] + math.exp(own - highest[g]))
        start = np.uint32(start + cuda.gridDim.x * np.uint32(THREADS))
        n = candidates[min(start + thread, num - np.uint32(1))]
    if SUMMED:
        for g in static(GROUP):
            top = block_max(highest[g], warps, thread, np.uint32(THREADS))
            own = np.float32(mass[g] * math.exp(highest[g] - top)) if mass[g] > 0 else np.float32(0)
            own = block_sum(own, warps, thread, np.uint32(THREADS))
            if thread == 0:
                sums[b, h, g, cuda.blockIdx.x, 0], sums[b, h, g, cuda.blockIdx.x, 1] = top, own
