"""Layers full of random tokens without a model, and consecutive steps that choose some of the same rows.

`share` and `overlap` are the part of a step's rows that the step before had chosen too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pariskv.bench.timing import Timer, layers_to_cycle
from pariskv.binding import LayerPipeline, bind
from pariskv.cache import window_of
from pariskv.config import Config, parse_config
from pariskv.decode import attend_layer
from pariskv.errors import ConfigError
from pariskv.layer import LayerState
from pariskv.registry import Registry
from pariskv.resolve import for_device
from pariskv.types import LayerInfo, Selected, Selection, Store
from pariskv.window import Window

STORES: dict[str, tuple[str, dict[str, object]]] = {
    "resident": ("resident", {}),
    "uva": ("uva", {"reuse": False}),
    "uva reuse": ("uva", {"reuse": True}),
}
"""What benchmarks call a store: the retriever and its options."""

SET_BY_OPTIONS = {
    "store": "--store",
    "retrievers.uva.reuse": "--store",
    "layers.default.top_k": "--top-k",
    "layers.default.candidates": "--candidates",
    "runtime.graph": "--graph or --no-graph",
    "runtime.compile": "--compile or --no-compile",
}
"""Keys that no override may set, and what sets them."""

BISECTIONS = 12


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of a layer: those of Llama-3-8B and Qwen3-8B."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def info(self, index: int, batch: int, device: torch.device) -> LayerInfo:
        return LayerInfo(
            index, batch, self.kv_heads, self.group, self.head_dim, self.dtype, device, self.head_dim**-0.5
        )


def layers_for(info: LayerInfo, tokens: int, timer: Timer) -> int:
    """As many layers as it takes for what a step of pariskv reads of all their codes to exceed the L2."""
    return layers_to_cycle(info.batch * info.kv_heads * tokens * info.head_dim // 8, timer.l2_bytes)


def bench_config(
    store: str, top_k: int, candidates: str | int | float, overrides: Sequence[str] = (), **runtime: object
) -> Config:
    """ParisKV in every layer over one of `STORES`, the window at its defaults, and `key=value` overrides on top.

    Raises ConfigError for an override of what a benchmark's options set.
    """
    for override in overrides:
        if (key := override.partition("=")[0]) in SET_BY_OPTIONS:
            raise ConfigError(f"{override}: here {key} is set by {SET_BY_OPTIONS[key]}")
    name, options = STORES[store]
    return parse_config(
        {
            "store": name,
            "retrievers": {name: options} if options else {},
            "layers": {"default": {"retriever": "pariskv", "candidates": candidates, "top_k": top_k}},
            "runtime": runtime,
        },
        overrides,
    )


def bench_pipeline(config: Config, device: torch.device) -> tuple[LayerPipeline, Window]:
    """The bound stages of a layer on the device, and its window."""
    pipeline = bind(for_device(config, device), 1, Registry.load())[0]
    return pipeline, window_of(pipeline, config.window, 0)


class DecodeSteps:
    """A decode step of each of several layers, run after run with other queries.

    calls     one for each layer
    sequence  [runs, L, B, H, G, D], the queries: `mix` of a run's are the last run's, the rest is noise
    """

    def __init__(self, layers: Sequence[LayerState], mix: float, runs: int):
        queries = [query_sequence(layer.info, mix, runs, layer.info.index) for layer in layers]
        self.sequence = torch.stack(queries, dim=1)
        self._heads = self.sequence[0].clone()  # what captured calls read
        self.calls = [partial(attend_layer, layer, heads) for layer, heads in zip(layers, self._heads, strict=True)]

    def before(self, run: int) -> None:
        """Put a run's queries where the calls read them."""
        self._heads.copy_(self.sequence[run])


def selected_indices(layer: LayerState, heads: Tensor) -> Tensor:
    """What a step with the queries [B, H, G, D] fetches: int32 [B, H, K]."""
    found: list[Tensor] = []
    original = layer.pipeline
    fetch = original.fetch
    assert fetch is not None

    def recording(selection: Selection, store: Store, slots: Tensor) -> Selected:
        found.append(selection.indices.clone())
        return fetch(selection, store, slots)

    layer.pipeline = replace(original, fetch=recording)
    try:
        attend_layer(layer, heads)
    finally:
        layer.pipeline = original
    return found[0]


def overlap(before: Tensor, after: Tensor) -> float:
    """The part of the chosen rows `after` [..., K] that are among `before` too; -1 is no row."""
    ordered = before.sort(dim=-1).values
    place = torch.searchsorted(ordered, after.contiguous()).clamp(max=ordered.shape[-1] - 1)
    is_row = after >= 0
    shared = (ordered.gather(-1, place) == after) & is_row
    return float(shared.sum() / is_row.sum().clamp(min=1))


def mean_overlap(steps: Sequence[Tensor]) -> float:
    """The mean of `overlap` from each step to the next."""
    pairs = [overlap(before, after) for before, after in pairwise(steps)]
    return sum(pairs) / len(pairs)


def query_sequence(info: LayerInfo, mix: float, steps: int, seed: int = 0) -> Tensor:
    """Queries [steps, B, H, G, D] of consecutive steps: each `mix` of the last one, the rest noise, of equal length."""
    random = torch.Generator(info.device).manual_seed(seed)
    size = (steps, info.batch, info.kv_heads, info.group, info.head_dim)
    noise = torch.randn(size, generator=random, device=info.device)
    queries = noise.clone()
    for step in range(1, steps):
        queries[step] = mix * queries[step - 1] + (1 - mix**2) ** 0.5 * noise[step]
    return queries.to(info.dtype)


def mix_for_overlap(measure: Callable[[float], float], wanted: float) -> float:
    """The `mix` of `query_sequence` at which the measured overlap, which grows with it, is as wanted."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) < wanted else (low, middle)
    return (low + high) / 2


def overlapping_indices(
    shape: Sequence[int], count: int, tokens: int, share: float, steps: int, device: torch.device
) -> Tensor:
    """Random rows of consecutive steps that share exactly round(share x count) rows with the step before.

    shape    heads, layers: every one chooses for itself
    returns  int32 [steps, *shape, count], ascending, below `tokens`
    """
    kept = round(share * count)
    if tokens < 2 * count - kept:
        raise ValueError(f"tokens: wanted at least {2 * count - kept} to choose {count} rows from, got {tokens}")
    random = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=random, device=device)

    chosen = [draw(*shape, tokens).topk(count).indices]
    while len(chosen) < steps:
        last = chosen[-1]
        keep = last.gather(-1, draw(*last.shape).topk(kept).indices)
        new = draw(*shape, tokens).scatter_(-1, last, -1.0).topk(count - kept).indices
        chosen.append(torch.cat((keep, new), dim=-1))
    return torch.stack(chosen).sort(dim=-1).values.int()
