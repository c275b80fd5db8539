"""MagicPIG's placement cpu: the zone's own copy in host memory, sampled and attended to by all cores.

What crosses the bus in a step are the queries, their hashes, and a finished attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pariskv_kernels.lsh import Queries, Tables, Zone, build_tables, sampled_attention
from torch import Tensor

from pariskv.types import TOKENS, CodeField, Codes, LayerInfo, Partial, Query, Selection, Tensors
from pariskv_plugins.magicpig.sample import SampledCodes, count_sample, queries_of, rule_of

if TYPE_CHECKING:
    from pariskv_plugins.magicpig import Options

HOST = torch.device("cpu")


def allocate(layer: LayerInfo, capacity: int, options: Options) -> Codes:
    """Codes in host memory, wherever the layer is; S = segment, M of them.

    keys, values  [B, H, N, D]            bfloat16 of bfloat16, else float32
    norms         [B, H, N]               of the centred keys
    hashes        [B, H, L, N]            every key's buckets, without segments
    order         [B, H, M, L, S]         with segments: places in the segment, bucket after bucket
    starts        [B, H, M, L, 2^K + 1]   and where each bucket begins
    """
    rows = CodeField((TOKENS, layer.head_dim), host_dtype(layer.dtype), read="part")
    spec = {"keys": rows, "values": rows, "norms": CodeField((TOKENS,), torch.float32, read="part")}
    tables, segment = options.tables, options.segment
    if segment:
        buckets = (1 << options.bits) + 1
        spec["order"] = CodeField((TOKENS, tables, segment), torch.int16, tokens_per_entry=segment, read="part")
        spec["starts"] = CodeField((TOKENS, tables, buckets), torch.int16, tokens_per_entry=segment, read="part")
    else:
        spec["hashes"] = CodeField((tables, TOKENS), torch.int16)
    return SampledCodes.empty(replace(layer, device=HOST), capacity, **spec)


def host_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def encode(keys: Tensor, values: Tensor, norms: Tensor, hashes: Tensor, options: Options) -> Tensors:
    dtype = host_dtype(keys.dtype)
    rows = {"keys": keys.to(dtype), "values": values.to(dtype), "norms": norms}
    if options.segment:
        return rows | build_tables(hashes, options.segment, options.bits)._asdict()
    return rows | {"hashes": hashes}


def attend_to_sample(query: Query, codes: Codes, options: Options) -> Selection:
    """No slots, and the attention to each query head's sample as `partial`."""
    queries = Queries(*(tensor.to(HOST).contiguous() for tensor in queries_of(query)))
    zone = Zone(codes["keys"], codes["values"], codes["norms"], codes.length.to(HOST))
    buckets = Tables(codes["order"], codes["starts"]) if options.segment else codes["hashes"]
    found = sampled_attention(queries, zone, buckets, rule_of(query, options))
    count_sample(codes, found.rows, found.rows)
    device = query.heads.device
    nothing = torch.empty(*query.heads.shape[:2], 0, dtype=torch.int32, device=device)
    return Selection(nothing, partial=Partial(found.out.to(device), found.lse.to(device)))
