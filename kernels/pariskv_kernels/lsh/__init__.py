"""Locality-sensitive hashing by signs of random projections, and attention to a sample of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.lsh import naive
from pariskv_kernels.lsh.naive import COLLISIONS, Queries, Rule, Sampled, Tables, Zone, inclusion, log_weights

__all__ = [
    "COLLISIONS",
    "MAX_BITS",
    "MAX_SEGMENT",
    "Queries",
    "Rule",
    "Sampled",
    "Tables",
    "Zone",
    "build_tables",
    "count_collisions",
    "hash_codes",
    "inclusion",
    "log_weights",
    "sampled_attention",
]

MAX_BITS = 14
"""Hashes, and places of a segment, are 16-bit integers without a sign."""
MAX_SEGMENT = 1 << 14


def hash_codes(vectors: Tensor, planes: Tensor, bits: int) -> Tensor:
    """Each vector's bucket in every table: the signs of its products with the table's planes, packed.

    vectors  [B, H, n, D]   floating point
    planes   [D, L * bits]  float64
    returns  [B, H, L, n]   int16, 0 to 2^bits - 1; a product of 0 counts as positive

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("vectors", vectors)
    check_shape("vectors", vectors, None, None, None, None)
    check_dtype("planes", planes, torch.float64)
    check_shape("planes", planes, vectors.shape[-1], None)
    check_bits(bits)
    if planes.shape[1] % bits:
        raise ValueError(f"planes: wanted {bits} for each table, got {planes.shape[1]} in all")
    return naive.hash_codes(vectors, planes, bits)


def build_tables(codes: Tensor, segment: int, bits: int) -> Tables:
    """Hash tables of every `segment` tokens, from `hash_codes` of whole segments.

    codes  [B, H, L, n]  int16

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_dtype("codes", codes, torch.int16)
    check_shape("codes", codes, None, None, None, None)
    check_bits(bits)
    if not 1 <= segment <= MAX_SEGMENT or codes.shape[-1] % segment:
        raise ValueError(
            f"segment: wanted 1 to {MAX_SEGMENT}, a divisor of the {codes.shape[-1]} tokens, got {segment}"
        )
    return naive.build_tables(codes, segment, bits)


def count_collisions(codes: Tensor, hashes: Tensor, lengths: Tensor) -> Tensor:
    """In how many tables each key shares each query's bucket.

    codes    [B, H, L, N]  int16, of the keys
    hashes   [B, H, L, G]  int16, of the queries
    lengths  [B]           int32, valid keys of each row
    returns  [B, H, G, N]  int16, 0 past a row's length

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    _check_codes(codes, hashes, lengths)
    if is_compiled_for(codes, hashes, lengths):
        from pariskv_kernels.lsh import cpu

        return cpu.count_collisions(codes, hashes, lengths)
    return naive.count_collisions(codes, hashes, lengths)


def sampled_attention(queries: Queries, zone: Zone, buckets: Tensor | Tables, rule: Rule) -> Sampled:
    """Attention of each query to the keys that share its bucket in at least two tables, made up for by weights.

    A key is sampled with the probability u(cos) of `inclusion`, so its score gets - log(u + 1e-4). The cosine is
    that of the query and the centred key; the score is that of the key as it is.

    buckets  `hash_codes` of the keys [B, H, L, N], or their `build_tables`

    Raises TypeError or ValueError naming the argument.
    Source: MagicPIG (arXiv 2410.16179), section 4; `naive.py` is the definition.
    """
    _check_sampling(queries, zone, buckets)
    if is_compiled_for(*queries, *zone, *(buckets if isinstance(buckets, Tables) else (buckets,))):
        from pariskv_kernels.lsh import cpu

        return cpu.sampled_attention(queries, zone, buckets, rule)
    return naive.sampled_attention(queries, zone, buckets, rule)


def check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits: wanted 1 to {MAX_BITS}, got {bits}")


def _check_codes(codes: Tensor, hashes: Tensor, lengths: Tensor) -> None:
    check_dtype("codes", codes, torch.int16)
    check_shape("codes", codes, None, None, None, None)
    check_dtype("hashes", hashes, torch.int16)
    check_shape("hashes", hashes, *codes.shape[:3], None)
    check_shape("lengths", lengths, codes.shape[0])


def _check_sampling(queries: Queries, zone: Zone, buckets: Tensor | Tables) -> None:
    check_dtype("queries.heads", queries.heads, torch.float32)
    check_shape("queries.heads", queries.heads, None, None, None, None)
    batch, heads, group, dim = queries.heads.shape
    check_shape("queries.shifts", queries.shifts, batch, heads, group)
    check_dtype("zone.keys", zone.keys, torch.float32, torch.bfloat16)
    check_shape("zone.keys", zone.keys, batch, heads, None, dim)
    check_dtype("zone.values", zone.values, zone.keys.dtype)
    check_shape("zone.values", zone.values, *zone.keys.shape)
    check_shape("zone.norms", zone.norms, *zone.keys.shape[:3])
    if not isinstance(buckets, Tables):
        _check_codes(buckets, queries.hashes, zone.lengths)
        check_shape("buckets", buckets, batch, heads, None, zone.keys.shape[2])
        return
    check_dtype("buckets.order", buckets.order, torch.int16)
    check_shape("buckets.order", buckets.order, batch, heads, None, queries.hashes.shape[2], None)
    check_dtype("buckets.starts", buckets.starts, torch.int16)
    check_shape("buckets.starts", buckets.starts, *buckets.order.shape[:4], None)
    if buckets.order.shape[2] * buckets.order.shape[4] < zone.keys.shape[2]:
        raise ValueError(f"buckets.order: {tuple(buckets.order.shape)} does not cover {zone.keys.shape[2]} keys")
