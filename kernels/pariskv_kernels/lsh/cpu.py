"""`count_collisions` and `sampled_attention` compiled for a CPU, on as many threads as torch uses.

The work is cut into spans of tokens, whatever the threads are, so that the result does not depend on them.
"""

from __future__ import annotations

import math
import threading

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from pariskv_kernels.lsh.naive import COLLISIONS, FLOOR, Queries, Rule, Sampled, Tables, Zone

SPAN = 4096
"""Tokens whose collisions are counted at a time: the counts, and what is attended to, stay in a core's cache."""

PARALLEL_FROM = 1 << 16
"""Tokens times heads below which one thread is faster."""

ONE_AT_A_TIME = threading.Lock()
"""Some of Numba's thread pools end the process when two threads start a parallel loop at once."""


def count_collisions(codes: Tensor, hashes: Tensor, lengths: Tensor) -> Tensor:
    batch, heads, _, tokens = codes.shape
    counts = torch.zeros(batch, heads, hashes.shape[-1], tokens, dtype=torch.int16)
    with ONE_AT_A_TIME:
        _use_threads(batch * heads * tokens)
        _count_all(codes.numpy(), hashes.numpy(), lengths.numpy(), counts.numpy())
    return counts


def sampled_attention(queries: Queries, zone: Zone, buckets: Tensor | Tables, rule: Rule) -> Sampled:
    batch, heads, group, dim = queries.heads.shape
    tokens = zone.keys.shape[2]
    span = buckets.order.shape[-1] if isinstance(buckets, Tables) else SPAN
    num_spans = -(-tokens // span)
    out = torch.zeros(batch, heads, num_spans, group, dim)
    lse = torch.full((batch, heads, num_spans, group), -math.inf)
    rows = torch.zeros(batch, heads, num_spans, dtype=torch.int64)
    results = (out.numpy(), lse.numpy(), rows.numpy())
    asked = (queries.heads.numpy(), queries.hashes.numpy(), queries.shifts.numpy())
    held = (_as_bits(zone.keys), _as_bits(zone.values), zone.norms.numpy(), zone.lengths.numpy())
    numbers = (rule.bits, rule.tables, rule.scaling, rule.softcap or 0.0)
    with ONE_AT_A_TIME:
        _use_threads(batch * heads * tokens)
        if isinstance(buckets, Tables):
            _attend_by_tables(asked, held, buckets.order.numpy(), buckets.starts.numpy(), numbers, results)
        else:
            _attend_by_codes(asked, held, buckets.numpy(), span, numbers, results)
    total = lse.logsumexp(2)
    shares = (lse - total.unsqueeze(2).nan_to_num(neginf=0.0)).exp()
    return Sampled((shares.unsqueeze(-1) * out).sum(2), total, rows.sum(-1))


def _use_threads(work: int) -> None:
    torch_threads = torch.get_num_threads()
    available = min(torch_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(available if work >= PARALLEL_FROM else 1)
    # Where both use one OpenMP, the first call starts Numba's pool, and torch would take the size of that from then on.
    if torch.get_num_threads() != torch_threads:
        torch.set_num_threads(torch_threads)


def _as_bits(rows: Tensor) -> np.ndarray:
    """Rows [B, H, N, D] of float32 or bfloat16 as 16-bit words, so that one compiled function reads both."""
    bits: np.ndarray = rows.view(torch.int16).numpy().view(np.uint16)
    return bits


@njit(cache=True, nogil=True, parallel=True)
def _count_all(codes, hashes, lengths, counts):  # type: ignore[no-untyped-def]
    batch, heads, _, tokens = codes.shape
    spans = (tokens + SPAN - 1) // SPAN
    for task in prange(batch * heads * spans):
        b, h, first = task // spans // heads, task // spans % heads, task % spans * SPAN
        last = min(first + SPAN, lengths[b])
        if first < last:
            _count_by_codes(codes[b, h], hashes[b, h], first, last, counts[b, h, :, first:last])


@njit(cache=True, nogil=True)
def _count_by_codes(codes, hashes, first, last, counts):  # type: ignore[no-untyped-def]
    """Add to counts [G, last - first] how often the codes [L, N] of the tokens are the hashes [L, G]."""
    for table in range(codes.shape[0]):
        row = codes[table, first:last]
        for g in range(hashes.shape[1]):
            wanted, own = hashes[table, g], counts[g]
            for i in range(last - first):
                own[i] += np.int16(row[i] == wanted)


@njit(cache=True, nogil=True)
def _count_by_tables(order, starts, hashes, counts):  # type: ignore[no-untyped-def]
    """The same from one segment's order [L, S] and starts [L, buckets + 1]: only the queries' buckets are read."""
    for table in range(order.shape[0]):
        for g in range(hashes.shape[1]):
            bucket = hashes[table, g]
            for place in range(starts[table, bucket], starts[table, bucket + 1]):
                counts[g, order[table, place]] += 1


@njit(cache=True, nogil=True, parallel=True)
def _attend_by_codes(asked, held, codes, span, numbers, results):  # type: ignore[no-untyped-def]
    batch, heads, _, tokens = codes.shape
    group, lengths = asked[0].shape[2], held[3]
    spans = (tokens + span - 1) // span
    for task in prange(batch * heads * spans):
        b, h, part = task // spans // heads, task // spans % heads, task % spans
        first = part * span
        last = min(first + span, lengths[b])
        if first < last:
            counts = np.zeros((group, last - first), np.int16)
            _count_by_codes(codes[b, h], asked[1][b, h], first, last, counts)
            _attend(asked, held, b, h, part, first, counts, numbers, results)


@njit(cache=True, nogil=True, parallel=True)
def _attend_by_tables(asked, held, order, starts, numbers, results):  # type: ignore[no-untyped-def]
    batch, heads, spans, _, span = order.shape
    group, lengths = asked[0].shape[2], held[3]
    spans = min(spans, results[1].shape[2])
    for task in prange(batch * heads * spans):
        b, h, part = task // spans // heads, task // spans % heads, task % spans
        first = part * span
        if first + span <= lengths[b]:
            counts = np.zeros((group, span), np.int16)
            _count_by_tables(order[b, h, part], starts[b, h, part], asked[1][b, h], counts)
            _attend(asked, held, b, h, part, first, counts, numbers, results)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _attend(asked, held, b, h, part, first, counts, numbers, results):  # type: ignore[no-untyped-def]
    """Softmax over the sampled of the tokens first, first + 1, ..., one after the other."""
    heads, shifts = asked[0][b, h], asked[2][b, h]
    keys, values, norms = held[0][b, h], held[1][b, h], held[2][b, h]
    out, lse = results[0][b, h, part], results[1][b, h, part]
    group, dim = heads.shape
    query_norms, largest, total = np.empty(group), np.full(group, -np.inf), np.zeros(group)
    for g in range(group):
        query_norms[g] = math.sqrt((heads[g] * heads[g]).sum())
    key, value = np.empty(dim, np.float32), np.empty(dim, np.float32)
    sampled = 0
    for i in range(counts.shape[1]):
        if not _is_sampled(counts, i):
            continue
        sampled += 1
        _widen(keys[first + i], key)
        _widen(values[first + i], value)
        for g in range(group):
            if counts[g, i] < COLLISIONS:
                continue
            product = np.float32(0)
            for d in range(dim):
                product += heads[g, d] * key[d]
            cosine = (product - shifts[g]) / max(query_norms[g] * norms[first + i], 1e-38)
            score = _score(product, cosine, numbers)
            if score > largest[g]:
                old = np.float32(math.exp(largest[g] - score))
                total[g] *= old
                for d in range(dim):
                    out[g, d] *= old
                largest[g] = score
            weight = np.float32(math.exp(score - largest[g]))
            total[g] += weight
            for d in range(dim):
                out[g, d] += weight * value[d]
    for g in range(group):
        if total[g] > 0:
            out[g] /= np.float32(total[g])
            lse[g] = largest[g] + math.log(total[g])
    results[2][b, h, part] = sampled


@njit(cache=True, nogil=True)
def _is_sampled(counts, i):  # type: ignore[no-untyped-def]
    most = np.int16(0)
    for g in range(counts.shape[0]):
        most = max(most, counts[g, i])
    return most >= COLLISIONS


@njit(cache=True, nogil=True)
def _widen(words, row):  # type: ignore[no-untyped-def]
    """A row of float32 or bfloat16, given as 16-bit words, as float32."""
    if words.shape[0] == row.shape[0]:
        bits = row.view(np.uint32)
        for d in range(row.shape[0]):
            bits[d] = np.uint32(words[d]) << np.uint32(16)
    else:
        halves = row.view(np.uint16)
        for d in range(words.shape[0]):
            halves[d] = words[d]


@njit(cache=True, nogil=True)
def _score(product, cosine, numbers):  # type: ignore[no-untyped-def]
    """The scaled, capped score and the logarithm of the weight, in float64."""
    bits, tables, scaling, softcap = numbers
    score = product * scaling
    if softcap > 0:
        score = softcap * math.tanh(score / softcap)
    p = (1 - math.acos(min(max(cosine, -1.0), 1.0)) / math.pi) ** bits
    others = (1 - p) ** (tables - 1)
    return score - math.log(1 - others * (1 - p) - tables * p * others + FLOOR)
