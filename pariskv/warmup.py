"""One retrieval on a few random tokens, so that what compiles at its first call does so before a request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from pariskv.binding import LayerPipeline
from pariskv.decode import attend_layer
from pariskv.errors import noted
from pariskv.layer import LayerState
from pariskv.request import Request
from pariskv.types import LayerInfo
from pariskv.window import Window

TOKENS = 32
"""Tokens of the zone, rounded up to whole blocks."""

WARMING_UP = "while warming up a layer of its kind on random tokens"


@torch.no_grad()
def warm_up(info: LayerInfo, pipelines: Collection[LayerPipeline]) -> None:
    """Run the stages of each kind of pipeline once, in a layer of its own that is thrown away.

    info  sizes, dtype and device of a layer of the model
    """
    kinds: dict[tuple[tuple[str, str], ...], LayerPipeline] = {}
    for pipeline in pipelines:
        kinds.setdefault(tuple(sorted(pipeline.names.items())), pipeline)
    for pipeline in kinds.values():
        if any("pre_rope" in encoder.needs for encoder in pipeline.encoders):
            continue  # random keys have no embedding to undo
        with noted(WARMING_UP):
            _one_step(replace(info, batch=1), pipeline.plain)


def _one_step(info: LayerInfo, pipeline: LayerPipeline) -> None:
    update = pipeline.block * -(-TOKENS // pipeline.block)
    layer = LayerState(info, pipeline, Window(sink=1, local=1, update=update), Request(new_tokens=2))
    tokens = 2 + update
    kv_heads, head_dim = info.kv_heads, info.head_dim
    keys, values = torch.randn(2, 1, kv_heads, tokens, head_dim, dtype=info.dtype, device=info.device)
    heads = torch.randn(1, kv_heads * info.group, tokens, head_dim, dtype=info.dtype, device=info.device)
    layer.append(keys, values)
    layer.chunk_attended(heads, None)
    layer.append(keys[:, :, :1], values[:, :, :1])
    attend_layer(layer, heads[:, :, 0].reshape(1, kv_heads, info.group, head_dim))
