"""`estimate_scores_by_head` on a GPU: a few lanes of a warp for each candidate.

A lane keeps eight coordinates of every head's query in registers and reads the key's codes of these, one word; the
word beside it is its neighbour's, so nothing has to be staged. What the lanes have summed is then folded: at each step
a lane hands half of its sums to the lane opposite and adds what it gets to the other half, until each lane is left with
the whole score of one candidate for one head. On request a block also adds up the exponentials of its scores.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import exchanged, fp16_to_float, joined, loads_first
from pariskv_kernels.launch import blocks_for, launch, multiprocessors
from pariskv_kernels.rerank.cuda import NOTHING, scaled_levels
from pariskv_kernels.specialise import static, template

COORDINATES = 8
"""Coordinates of a lane: the codes of so many are a word."""

BLOCKS_PER_MULTIPROCESSOR = 5


def estimate_scores_by_head(
    rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, threads: int = 128
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
    threads: int = 128,
) -> tuple[Tensor, Tensor]:
    """The estimates, and of each head's scores, scaling x (estimate + offset), soft-capped, what `combine` goes by.

    offset   None: nothing is added up, and the sums hold anything
    returns  [B, H, G, C], of which the heads of a candidate lie side by side, and [B, H, G, parts, 3], the highest
             score of a part, the sum of exp(score - highest), and how many they are
    """
    batch, heads, group, padded = rotated.shape
    num, tokens, subspaces = indices.shape[2], codes.shape[2], weights.shape[3]
    lanes, padded_group = padded // COORDINATES, 1 << (group - 1).bit_length()
    items = max(1, lanes // padded_group)
    constants = {
        "PADDED": padded,
        "M": padded // subspaces,
        "GROUP": group,
        "HEADS": padded_group,
        "COORDINATES": COORDINATES,
        "LANES": lanes,
        "FOLDS": lanes.bit_length() - 1,
        "ITEMS": items,
        "REST": items * padded_group // lanes,
        "SUMMED": offset is not None,
        "CAPPED": softcap is not None,
    }
    fill = blocks_for(BLOCKS_PER_MULTIPROCESSOR * multiprocessors(rotated.device), batch * heads)
    rounds = blocks_for(num, fill * (threads // lanes * items))
    blocks = blocks_for(num, max(1, rounds) * (threads // lanes * items))
    scores = torch.empty(batch, heads, num, group, dtype=torch.float32, device=rotated.device)
    sums = torch.empty(batch, heads, group, blocks, 3, dtype=torch.float32, device=rotated.device)
    launch(
        estimate_group(**constants, THREADS=threads),
        (blocks, heads, batch),
        threads,
        rotated,
        codes.view(torch.int32).view(-1),
        weights.view(torch.int16 if padded // subspaces == COORDINATES else torch.int32).view(-1),
        indices,
        scaled_levels(padded, padded // subspaces, rotated.device),
        scores,
        sums[..., 0, 0] if offset is None else offset,
        sums,
        np.float32(scaling),
        np.float32(softcap or 0),
        tokens,
    )
    return scores.transpose(2, 3), sums


@template
def estimate_group(rotated, codes, weights, indices, levels, scores, offset, sums, scaling, softcap, tokens):
    """rotated [B, H, GROUP, PADDED]; codes and weights [B, H, tokens, LANES], in a line; scores [B, H, C, GROUP].

    LANES work at ITEMS candidates at a time. Of a lane's sums, `value[item * HEADS + head]`, HEADS a power of two, REST
    remain after the folds: that of its own candidate and head, or those of several heads.
    """
    table = cuda.shared.array(16, np.float32)
    query = cuda.shared.array(HEADS * PADDED, np.float32)  # [HEADS, COORDINATES, LANES]
    highest_of = cuda.shared.array(THREADS * REST, np.float32)
    mass_of = cuda.shared.array(THREADS * REST, np.float32)
    many_of = cuda.shared.array(THREADS * REST, np.float32)
    thread, lane = np.uint32(cuda.threadIdx.x), np.uint32(cuda.threadIdx.x % LANES)
    h, b = cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    candidates, num = indices[b, h], indices.shape[2]
    first_row = np.uint64(b * cuda.gridDim.y + h) * np.uint64(tokens)
    for i in range(thread, 16, THREADS):
        table[i] = levels[i]
    for i in range(thread, HEADS * PADDED, THREADS):
        g, at = i // PADDED, i % PADDED
        coordinate = rotated[b, h, min(g, GROUP - 1), at]
        query[g * PADDED + at % COORDINATES * LANES + at // COORDINATES] = coordinate
    cuda.syncthreads()
    for i in static(HEADS * COORDINATES):
        own_query[i] = query[np.uint32(np.uint32(i * LANES) + lane)]
    own_head = lane * np.uint32(REST) % np.uint32(HEADS)
    for r in static(REST):
        own_offset[r] = offset[b, h, min(own_head + np.uint32(r), np.uint32(GROUP - 1))]
        highest[r], mass[r], many[r] = NOTHING, np.float32(0), np.float32(0)
    # The same number of rounds for all threads of a block; past the end they look at the last candidate again.
    for start in range(cuda.blockIdx.x * (THREADS // LANES * ITEMS), num, cuda.gridDim.x * (THREADS // LANES * ITEMS)):
        first = start + np.int32(thread // np.uint32(LANES)) * ITEMS
        own = first + np.int32(lane * np.uint32(REST) // np.uint32(HEADS))
        own_position = candidates[min(own, num - 1)]
        for i in static(ITEMS):
            position[i] = candidates[min(first + i, num - 1)]
        loads_first()
        for i in static(ITEMS):
            at = (first_row + np.uint64(max(position[i], 0))) * np.uint64(LANES) + np.uint64(lane)
            word[i], weight[i] = np.uint32(codes[at]), np.uint32(weights[at])
        loads_first()
        for i in static(ITEMS):
            for g in static(HEADS):
                value[i * HEADS + g] = np.float32(0)
            for part in static(COORDINATES // M):
                for g in static(HEADS):
                    block[g] = np.float32(0)
                for j in static(M):
                    code = np.uint32(word[i] >> np.uint32(4 * (part * M + j)))
                    level = table[np.uint32(code & np.uint32(15))]
                    for g in static(HEADS):
                        block[g] += level * own_query[g * COORDINATES + part * M + j]
                factor = fp16_to_float(np.int32(np.uint32(weight[i] >> np.uint32(16 * part)) & np.uint32(0xFFFF)))
                for g in static(HEADS):
                    value[i * HEADS + g] += factor * block[g]
        for k in static(FOLDS):
            is_upper = lane & np.uint32(LANES >> (k + 1)) != 0
            for i in static(REST * LANES >> (k + 1)):
                low, high = value[i], value[i + (REST * LANES >> (k + 1))]
                sent, kept = (low, high) if is_upper else (high, low)
                value[i] = kept + exchanged(sent, highest_of, thread, LANES >> (k + 1))
        for r in static(REST):
            if own < num and own_head + np.uint32(r) < np.uint32(GROUP):
                scores[b, h, own, own_head + np.uint32(r)] = value[r] if own_position >= 0 else NOTHING
                if SUMMED and own_position >= 0:
                    score = np.float32((value[r] + own_offset[r]) * scaling)
                    if CAPPED:
                        score = np.float32(softcap * math.tanh(score / softcap))
                    highest[r], mass[r] = joined(highest[r], mass[r], score, np.float32(1))
                    many[r] += np.float32(1)
    if SUMMED:
        # Entry by entry the heads come in order, over and over.
        cuda.syncthreads()
        for r in static(REST):
            highest_of[thread * np.uint32(REST) + np.uint32(r)] = highest[r]
            mass_of[thread * np.uint32(REST) + np.uint32(r)] = mass[r]
            many_of[thread * np.uint32(REST) + np.uint32(r)] = many[r]
        half = THREADS * REST // 2
        while half >= HEADS:
            cuda.syncthreads()
            for i in range(thread, half, THREADS):
                highest_of[i], mass_of[i] = joined(highest_of[i], mass_of[i], highest_of[i + half], mass_of[i + half])
                many_of[i] += many_of[i + half]
            half //= 2
        cuda.syncthreads()
        for g in range(thread, GROUP, THREADS):
            sums[b, h, g, cuda.blockIdx.x, 0], sums[b, h, g, cuda.blockIdx.x, 1] = highest_of[g], mass_of[g]
            sums[b, h, g, cuda.blockIdx.x, 2] = many_of[g]
