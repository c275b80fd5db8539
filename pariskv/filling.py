"""Layers full of random tokens, without a model: for benchmarks, and for the planner's rehearsals."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv.binding import LayerPipeline
from pariskv.layer import LayerState
from pariskv.request import Request
from pariskv.types import LayerInfo
from pariskv.window import Window

CHUNK = 1 << 15
"""Tokens, of all rows together, that are made and appended at a time."""


def filled_layer(info: LayerInfo, pipeline: LayerPipeline, window: Window, tokens: int) -> LayerState:
    """A layer that has read `tokens` random tokens; layers of one index hold the same ones."""
    rotary = PlainRotary(info.head_dim, info.device)
    request = Request(prompt_tokens=tokens, new_tokens=window.update, prefilling=True, rotary=rotary)
    layer = LayerState(info, pipeline, window, request)
    fill_layer(layer, tokens)
    return layer


def fill_layer(layer: LayerState, tokens: int) -> None:
    """Let an empty layer read random tokens as a prompt, and end the prefill.

    The prompt's queries are zero; where a format learns from them, every query is its token's own key.
    """
    info = layer.info
    learns = any(encoder.needs & {"query_moment", "recent_queries"} for encoder in layer.pipeline.encoders)
    random = torch.Generator(info.device).manual_seed(info.index)
    chunk = max(1, CHUNK // info.batch)
    nothing = torch.zeros((), dtype=info.dtype, device=info.device)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        size = (2, info.batch, info.kv_heads, count, info.head_dim)
        keys, values = torch.randn(size, generator=random, dtype=info.dtype, device=info.device)
        layer.append(keys, values)
        queries = keys if learns else nothing.expand_as(keys)
        heads = queries.unsqueeze(2).expand(-1, -1, info.group, -1, -1)
        layer.chunk_attended(heads.flatten(1, 2), None)
    layer.end_prefill()


class PlainRotary:
    """A rotary embedding as Llama has it: coordinates d and d + D/2 turn by base^(-2d/D) per position."""

    def __init__(self, head_dim: int, device: torch.device, base: float = 500_000.0):
        self.frequencies = base ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._turned(keys, positions)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._turned(keys, -positions)

    def _turned(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [R, h, n, D] turned by positions [R, n] steps."""
        angles = positions[:, None, :, None] * self.frequencies
        cosines, sines = angles.cos(), angles.sin()
        first, second = keys.tensor_split(2, dim=-1)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(turned, dim=-1).to(keys.dtype)
