"""Bytes that the attention of a prompt's chunk takes: its result and its temporaries, by device and kind."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from pariskv.attention import QUERY_BLOCK, partial_attention
from pariskv.history import BLOCK
from pariskv.meter import Meter
from pariskv.types import LayerInfo

META = torch.device("meta")


def attention_bytes(info: LayerInfo, queries: int, tokens: int) -> int:
    """Of the last `queries` of `tokens` tokens over a buffer, as `dense_attention` does it."""
    if info.softcap is not None:
        return _metered(info, queries, tokens)
    is_fused = info.device.type == "cpu" or info.dtype in (torch.bfloat16, torch.float16)
    if not is_fused:
        return _scores(info, queries, tokens)
    # On a CPU the fused kernel takes a chunk's mask as numbers, made from a mask of flags.
    is_masked = info.device.type == "cpu" and 1 < queries < tokens
    return _result(info, queries) + queries * tokens * (1 + info.dtype.itemsize) * is_masked


def streamed_bytes(info: LayerInfo, queries: int, held: int, zone: int) -> int:
    """Of the same over the store: one row after the other, first over what is held, then over the zone in blocks.

    held  tokens of a row that are held with the chunk;    zone  those that have left before it
    """
    one = replace(info, batch=1)
    row = 2 * info.kv_heads * info.head_dim * info.dtype.itemsize
    block = min(zone, BLOCK)
    result = _result(replace(one, dtype=torch.float32), queries)
    always = 2 * info.batch * row * queries  # as it came, and behind what is held
    always += info.batch * _result(one, queries)
    if info.device.type == "cuda" and info.dtype.itemsize == 2:
        return always + 4 * result + 2 * row * block
    over_zone = result + _metered(one, queries, block, False) if block else 0
    return always + max(_metered(one, queries, held, True), over_zone, 4 * result)


def _result(info: LayerInfo, queries: int) -> int:
    """The result, and the logarithm of the sum of each query's weights."""
    heads = info.batch * info.kv_heads * info.group
    return heads * queries * (info.head_dim * info.dtype.itemsize + max(4, info.dtype.itemsize))


def _scores(info: LayerInfo, queries: int, tokens: int) -> int:
    """Without a fused kernel: scores and weights of all queries, keys and values repeated for each head."""
    heads = info.batch * info.kv_heads * info.group
    repeated = 2 * heads * tokens * info.head_dim * (info.group > 1)
    return _result(info, queries) + info.dtype.itemsize * (2 * heads * queries * tokens + repeated)


def _metered(info: LayerInfo, queries: int, tokens: int, is_causal: bool = True) -> int:
    """Written out in torch, a block of queries after the other."""
    block = min(queries, QUERY_BLOCK)
    return _result(info, queries) + _block_bytes(replace(info, index=0), block, tokens, is_causal)


@lru_cache(maxsize=4096)
def _block_bytes(info: LayerInfo, queries: int, tokens: int, is_causal: bool) -> int:
    query = torch.empty(info.batch, info.kv_heads * info.group, queries, info.head_dim, dtype=info.dtype, device=META)
    keys = torch.empty(info.batch, info.kv_heads, tokens, info.head_dim, dtype=info.dtype, device=META)
    with torch.no_grad(), Meter() as meter:
        partial_attention(query, keys, keys, info.scaling, info.softcap, is_causal)
    peak: int = meter.peak
    return peak - _result(info, queries)
