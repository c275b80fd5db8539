"""`attend_rows` on a GPU: a block attends to one tile of tokens, then the tiles are merged by log-sum-exp.

How a block of 256 threads reads a tile, at D = 128 of 64 tokens: 16 threads (lanes) share a key, each has 8 of its
dimensions, and each thread has 4 keys (slots: 16 at a time); 32 lanes share a value, 4 dimensions each, 8 values a
thread. All of it is asked for before the first is used. What the lanes of a key found is added in shared memory, and
so is what the slots of a value found. Weights are relative to the tile's largest score; the merge sets that right.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.attend import plan
from pariskv_kernels.attend.numbers import from_float, number_in
from pariskv_kernels.attend.other import Other, asked
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

NOTHING = np.float32(-np.inf)
ZERO = np.float32(0)


def attend_rows(
    heads: Tensor,
    rows: Tensor,
    steady: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    other: Other | None = None,
    threads: int = 256,
) -> tuple[Tensor, Tensor]:
    batch, num_heads, group, head_dim = heads.shape
    if valid is None:
        valid = steady.new_empty(batch, num_heads, 0)
    tokens = steady.shape[1] + valid.shape[2]
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, num_heads, group, dtype=torch.float32, device=heads.device)
    if tokens == 0:
        if other is not None:
            other_out, other_lse = asked(other, heads)
            return out.copy_(other_out.where(other_lse.unsqueeze(-1) > -math.inf, 0)), lse.copy_(other_lse)
        return out.zero_(), lse.fill_(-math.inf)
    constants = plan.constants(head_dim, group, heads.dtype, threads)
    attend = attend_tile(
        **constants, HAS_BIAS=bias is not None, HAS_CAP=softcap is not None, number=number_in(heads.dtype)
    )
    tiles = blocks_for(tokens, constants["TILE"])
    partial = lse.new_empty(lse.numel() * tiles * (head_dim + 2))
    words, strides = plan.words_of(rows)
    launch(
        attend,
        (tiles * constants["CHUNKS"], num_heads, batch),
        threads,
        heads.contiguous().view(torch.int64).view(-1),
        words,
        strides,
        steady.contiguous(),
        valid.contiguous(),
        lse if bias is None else bias.float().contiguous(),
        np.float32(scaling),
        np.float32(softcap or 0),
        partial,
    )
    parts = max(1, 2 * threads // head_dim)
    merge = merge_tiles(D=head_dim, PARTS=parts, HAS_OTHER=other is not None, store=from_float(heads.dtype))
    others = (lse, lse) if other is None else asked(other, heads)
    flat = [one.contiguous().view(-1) for one in others]
    launch(merge, (group, num_heads, batch), parts * head_dim, partial, tiles, *flat, out.view(-1), lse.view(-1))
    return out, lse


@cuda.jit(device=True)
def mask_of(steady, valid, b, h, token):
    """All bits of a row that is in use, none of any other."""
    num_steady = steady.shape[1]
    is_used = np.uint8(0)
    if token < num_steady:
        is_used = steady[b, np.uint32(token)]
    elif token < num_steady + valid.shape[2]:
        is_used = valid[b, h, np.uint32(token - num_steady)]
    return -np.int64(is_used)


@cuda.jit(device=True)
def weigh(scores, tops, masses, heads, tile, parts, thread, threads):
    """scores [heads, tile] become weights, against the largest of each head; its tokens fall into parts.

    tops, masses [heads, parts]: the largest score and the sum of the weights of each part
    """
    # The bounds of every loop are constants, so that it is unrolled.
    head, part = thread // parts, thread % parts
    if head < heads:
        top = NOTHING
        for t in range(0, tile, parts):
            if part + t < tile:
                top = max(top, scores[head * tile + part + t])
        tops[thread] = top
    cuda.syncthreads()
    for first in range(0, heads * tile, threads):
        pair = first + thread
        if pair < heads * tile:
            top = NOTHING
            for i in range(parts):
                top = max(top, tops[pair // tile * parts + i])
            score = scores[pair]
            # -inf - -inf would be NaN where nothing of the tile is in use.
            scores[pair] = ZERO if score == NOTHING else math.exp(score - top)
    cuda.syncthreads()
    if head < heads:
        mass = ZERO
        for t in range(0, tile, parts):
            if part + t < tile:
                mass += scores[head * tile + part + t]
        masses[thread] = mass


@template
def attend_tile(heads, words, strides, steady, valid, bias, scaling, softcap, partial):
    """partial float32 [B, H, G, tiles, D + 2]: weighted values, the largest score, and the sum of the weights."""
    scratch = cuda.shared.array(SHARED, np.float32)
    scores = cuda.shared.array(HEADS * TILE, np.float32)
    tops = cuda.shared.array(HEADS * PARTS, np.float32)
    masses = cuda.shared.array(HEADS * PARTS, np.float32)
    used = cuda.shared.array(TILE, np.int64)
    # The masks tell the compiler that no index is negative: Numba would test each.
    thread, h, b = cuda.threadIdx.x & (THREADS - 1), cuda.blockIdx.y & 65535, cuda.blockIdx.z & 65535
    tile, first_head = cuda.blockIdx.x // CHUNKS, cuda.blockIdx.x % CHUNKS * HEADS
    start, num_steady, tokens = tile * TILE, steady.shape[1], steady.shape[1] + valid.shape[2]
    key_slot, key_lane = thread // KEY_LANES, thread % KEY_LANES
    value_slot, value_lane = thread // VALUE_LANES, thread % VALUE_LANES

    # Every load goes out before the first is used. What lies past the tile or the tokens is read, and not used.
    last, step = np.uint32(tokens - 1), np.uint64(np.uint32(strides[2]))
    first_key = np.uint64(b * strides[0] + h * strides[1] + key_lane)
    for t in static(4):
        token = min(np.uint32(start + key_slot + t * KEY_SLOTS), last)
        for w in static(8 // PACKED):
            key[t * 8 // PACKED + w] = words[first_key + np.uint64(token) * step + np.uint64(w * KEY_LANES)]
    first_value = np.uint64(b * strides[0] + h * strides[1] + strides[3] + value_lane)
    for t in static(8):
        token = min(np.uint32(start + value_slot + t * VALUE_SLOTS), last)
        for w in static(4 // PACKED):
            value[t * 4 // PACKED + w] = words[first_value + np.uint64(token) * step + np.uint64(w * VALUE_LANES)]
    first_query = (b * cuda.gridDim.y + h) * G
    for g in static(HEADS):
        at = np.uint64((first_query + min(first_head + g, G - 1)) * (D // PACKED) + key_lane)
        for w in static(8 // PACKED):
            query[g * 8 // PACKED + w] = heads[at + np.uint64(w * KEY_LANES)]
    for i in static((HEADS * TILE + THREADS - 1) // THREADS):
        shift[i] = ZERO
        if HAS_BIAS:
            pair = thread + i * THREADS
            head, token = min(first_head + pair // TILE, G - 1), start + pair % TILE
            if num_steady <= token < tokens:
                shift[i] = bias[b, h, head, np.uint32(token - num_steady)]
    if thread < TILE:
        used[thread] = mask_of(steady, valid, b, h, start + thread)

    # Each lane's part of every query . key.
    for g in static(HEADS):
        for w in static(8 // PACKED):
            for e in static(PACKED):
                q[g * 8 + w * PACKED + e] = number(query[g * 8 // PACKED + w], e * BITS)
    for t in static(4):
        token = key_slot + t * KEY_SLOTS
        if key_slot < KEY_SLOTS and token < TILE:
            for w in static(8 // PACKED):
                for e in static(PACKED):
                    k[w * PACKED + e] = number(key[t * 8 // PACKED + w], e * BITS)
            for g in static(HEADS):
                product = ZERO
                for d in static(8):
                    product += q[g * 8 + d] * k[d]
                scratch[key_lane * PRODUCT_ROW + g * TILE + token] = product
    cuda.syncthreads()

    # A thread for each pair of a query head and a token: its score, then its weight against the largest of the tile.
    for i in static((HEADS * TILE + THREADS - 1) // THREADS):
        pair = thread + i * THREADS
        if pair < HEADS * TILE:
            score = ZERO
            for lane in static(KEY_LANES):
                score += scratch[lane * PRODUCT_ROW + pair]
            score *= scaling
            if HAS_CAP:
                score = softcap * np.float32(math.tanh(score / softcap))
            score += shift[i]
            scores[pair] = score if used[pair % TILE] != 0 else NOTHING
    cuda.syncthreads()
    weigh(scores, tops, masses, HEADS, TILE, PARTS, thread, THREADS)

    # Each slot's part of the weighted values; an unused one, which may be NaN, counts as 0.
    for i in static(HEADS * 4):
        sums[i] = ZERO
    for t in static(8):
        token = value_slot + t * VALUE_SLOTS
        if token < TILE:
            mask = used[token]
            for w in static(4 // PACKED):
                word = value[t * 4 // PACKED + w] & mask
                for e in static(PACKED):
                    v[w * PACKED + e] = number(word, e * BITS)
            for g in static(HEADS):
                weight = scores[g * TILE + token]
                for d in static(4):
                    sums[g * 4 + d] += weight * v[d]
    if value_slot < VALUE_SLOTS:
        for i in static(HEADS * 4):
            scratch[(value_slot * HEADS * 4 + i) * SUM_ROW + value_lane] = sums[i]
    cuda.syncthreads()
    tiles = cuda.gridDim.x // CHUNKS
    for i in static((HEADS * D + THREADS - 1) // THREADS):
        g, d = (thread + i * THREADS) // D, (thread + i * THREADS) % D
        if g < HEADS and first_head + g < G:
            word = d // PACKED
            at = (g * 4 + word // VALUE_LANES * PACKED + d % PACKED) * SUM_ROW + word % VALUE_LANES
            total = ZERO
            for slot in static(VALUE_SLOTS):
                total += scratch[slot * HEADS * 4 * SUM_ROW + at]
            partial[np.uint64(((first_query + first_head + g) * tiles + tile) * (D + 2) + d)] = total
    if thread < HEADS and first_head + thread < G:
        top, mass = NOTHING, ZERO
        for part in static(PARTS):
            top = max(top, tops[thread * PARTS + part])
            mass += masses[thread * PARTS + part]
        at = np.uint64(((first_query + first_head + thread) * tiles + tile) * (D + 2) + D)
        partial[at], partial[at + np.uint64(1)] = top, mass


@template
def merge_tiles(partial, tiles, other_out, other_lse, out, lse):
    """A block for each query head, PARTS threads for each dimension: each merges some of the tiles, four at a time.

    Where it HAS_OTHER, the first part begins with what that attention found.
    """
    values = cuda.shared.array(PARTS * D, np.float32)
    tops = cuda.shared.array(PARTS, np.float32)
    masses = cuda.shared.array(PARTS, np.float32)
    thread, g, h, b = cuda.threadIdx.x & 1023, cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    d, part = thread % D, thread // D
    row = (b * cuda.gridDim.y + h) * cuda.gridDim.x + g
    first_tile = np.uint64(row * tiles) * np.uint64(D + 2)
    top, mass, value = NOTHING, ZERO, ZERO
    if HAS_OTHER and part == 0 and other_lse[np.uint64(row)] != NOTHING:
        top, mass, value = other_lse[np.uint64(row)], np.float32(1), other_out[np.uint64(row * D + d)]
    for first in range(part, tiles, 4 * PARTS):
        for i in static(4):
            tile = np.uint64(min(np.uint32(first + i * PARTS), np.uint32(tiles - 1)))
            at = first_tile + tile * np.uint64(D + 2)
            value_of[i] = partial[at + np.uint64(d)]
            top_of[i] = partial[at + np.uint64(D)]
            mass_of[i] = partial[at + np.uint64(D + 1)]
        higher = top
        for i in static(4):
            if first + i * PARTS >= tiles:
                top_of[i] = NOTHING
            higher = max(higher, top_of[i])
        if higher != NOTHING:
            weight = math.exp(top - higher)
            value, mass, top = weight * value, weight * mass, higher
            for i in static(4):
                weight = math.exp(top_of[i] - higher)
                value += weight * value_of[i]
                mass += weight * mass_of[i]
    values[thread] = value
    if d == 0:
        tops[part], masses[part] = top, mass
    cuda.syncthreads()
    if part == 0:
        top, mass, value = NOTHING, ZERO, ZERO
        for i in static(PARTS):
            top = max(top, tops[i])
        if top != NOTHING:
            for i in static(PARTS):
                weight = math.exp(tops[i] - top)
                value += weight * values[i * D + d]
                mass += weight * masses[i]
            value /= mass
        out[np.uint64(row * D + d)] = store(value)
        if d == 0:
            lse[np.uint64(row)] = top + math.log(mass) if top != NOTHING else NOTHING
