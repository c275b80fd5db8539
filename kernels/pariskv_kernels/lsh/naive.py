"""The definitions: locality-sensitive hashes, collisions, and attention to what collides."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

COLLISIONS = 2
"""Tables in which a key must share the query's bucket to be sampled."""

AT_ONCE = 1024
"""Vectors a head whose products with all planes are written out at a time."""

FLOOR = 1e-4
"""Added to an inclusion probability before its logarithm is taken."""


class Tables(NamedTuple):
    """The buckets of every table, segment by segment of S tokens: M segments.

    order   [B, H, M, L, S]           int16, places in the segment, bucket after bucket
    starts  [B, H, M, L, 2^bits + 1]  int16, where each bucket begins in `order`
    """

    order: Tensor
    starts: Tensor


class Zone(NamedTuple):
    """The keys and values that are sampled from.

    keys, values  [B, H, N, D]  float32 or bfloat16
    norms         [B, H, N]     float32, of the centred keys
    lengths       [B]           int32; what is past them may be anything
    """

    keys: Tensor
    values: Tensor
    norms: Tensor
    lengths: Tensor


class Queries(NamedTuple):
    """A step's queries.

    heads   [B, H, G, D]  float32
    hashes  [B, H, L, G]  int16
    shifts  [B, H, G]     float32, their inner products with the centre that was taken from the keys
    """

    heads: Tensor
    hashes: Tensor
    shifts: Tensor


class Rule(NamedTuple):
    """Bits of a hash, number of tables, factor and cap of the scores."""

    bits: int
    tables: int
    scaling: float
    softcap: float | None


class Sampled(NamedTuple):
    """Attention to the sampled keys: out [B, H, G, D], log-sum-exp [B, H, G], keys [B, H] that any head sampled."""

    out: Tensor
    lse: Tensor
    rows: Tensor


def hash_codes(vectors: Tensor, planes: Tensor, bits: int) -> Tensor:
    """In float64: how many vectors there are, and how a product is blocked for them, then decides no sign."""
    parts = range(0, max(vectors.shape[2], 1), AT_ONCE)
    return torch.cat([_pack_signs(vectors[:, :, first : first + AT_ONCE], planes, bits) for first in parts], dim=-1)


def _pack_signs(vectors: Tensor, planes: Tensor, bits: int) -> Tensor:
    signs = vectors.double() @ planes >= 0  # [B, H, n, L * bits]
    weights = torch.bitwise_left_shift(1, torch.arange(bits, device=signs.device, dtype=torch.int16))
    words = (signs.reshape(*signs.shape[:-1], -1, bits) * weights).sum(-1, dtype=torch.int16)
    return words.transpose(-1, -2).contiguous()


def build_tables(codes: Tensor, segment: int, bits: int) -> Tables:
    """Tokens sorted by bucket; a stable sort, so tokens of a bucket stay in order."""
    buckets, order = codes.reshape(*codes.shape[:3], -1, segment).transpose(2, 3).sort(dim=-1, stable=True)
    edges = torch.arange((1 << bits) + 1, dtype=torch.int16, device=codes.device)
    starts = torch.searchsorted(buckets.contiguous(), edges.repeat(*buckets.shape[:-1], 1), out_int32=True)
    return Tables(order.to(torch.int16), starts.to(torch.int16))


def codes_of(tables: Tables) -> Tensor:
    """The codes [B, H, L, N] that the tables were built from."""
    order, starts = tables
    places = torch.arange(order.shape[-1], dtype=torch.int16, device=order.device).repeat(*order.shape[:-1], 1)
    buckets = torch.searchsorted(starts.contiguous(), places, right=True) - 1
    # Segments past a row's length hold anything, places outside of the segment too.
    order = order.clamp(0, order.shape[-1] - 1)
    codes = torch.empty_like(order).scatter_(-1, order.long(), buckets.to(torch.int16))
    return codes.transpose(2, 3).flatten(3)


def count_collisions(codes: Tensor, hashes: Tensor, lengths: Tensor) -> Tensor:
    """Table by table."""
    batch, heads, num_tables, tokens = codes.shape
    counts = torch.zeros(batch, heads, hashes.shape[-1], tokens, dtype=torch.int16, device=codes.device)
    for table in range(num_tables):
        counts += codes[:, :, table].unsqueeze(2) == hashes[:, :, table].unsqueeze(-1)
    is_token = torch.arange(tokens, device=codes.device) < lengths.view(-1, 1, 1, 1)
    return counts.where(is_token, 0)


def inclusion(cosines: Tensor, bits: int, tables: int) -> Tensor:
    """One table agrees with probability p; two or more do unless none or exactly one does."""
    angles = cosines.clamp(-1, 1).acos()
    p = (1 - angles / math.pi) ** bits
    none_of_the_others = (1 - p) ** (tables - 1)
    return 1 - none_of_the_others * (1 - p) - tables * p * none_of_the_others


def log_weights(products: Tensor, norms: Tensor, queries: Queries, rule: Rule) -> Tensor:
    """-log(u + FLOOR) of keys with the inner products [B, H, G, K] and the centred norms [B, H, K]."""
    lengths = queries.heads.norm(dim=-1).unsqueeze(-1) * norms.unsqueeze(2)
    cosines = (products - queries.shifts.unsqueeze(-1)) / lengths.clamp(min=torch.finfo(torch.float32).tiny)
    return -(inclusion(cosines, rule.bits, rule.tables) + FLOOR).log()


def sampled_attention(queries: Queries, zone: Zone, buckets: Tensor | Tables, rule: Rule) -> Sampled:
    """Every score is written out; those that were not sampled become -inf."""
    codes = codes_of(buckets) if isinstance(buckets, Tables) else buckets
    is_sampled = count_collisions(codes, queries.hashes, zone.lengths) >= COLLISIONS  # [B, H, G, N]
    is_token = torch.arange(codes.shape[-1], device=codes.device) < zone.lengths.view(-1, 1, 1)
    keys, values = (rows.float().where(is_token.unsqueeze(-1), 0) for rows in (zone.keys, zone.values))
    products = queries.heads @ keys.mT
    scores = products * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores + log_weights(products, zone.norms.where(is_token, 0), queries, rule)
    scores = scores.masked_fill(~is_sampled, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1).nan_to_num(neginf=0.0)).exp()
    return Sampled(weights @ values, lse, is_sampled.any(2).sum(-1))
