"""A layer's decode steps again, on the queries, keys and values of a dense pass: no model runs.

So every retriever answers the same queries over the same keys, and what is measured of it in one layer does not
depend on its errors in the layers before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pariskv.cache import RequestState
from pariskv.config import GenerationConfig
from pariskv.decode import attend_layer
from pariskv.errors import noted
from pariskv.layer import LayerState
from pariskv.metrics import Observed, dense_truth, measure, refuse_outside
from pariskv.sampling import Sampler
from pariskv.types import Budget, Codes, LayerInfo, Query, Selected, Selection, Store, Tensors

Learn = Callable[..., Tensors]
"""`encode` or `fit`, bound."""

PROBED_STEPS = 8
"""Steps of a layer that `fitting_top_k` looks at."""


@dataclass(frozen=True)
class LayerTrace:
    """What one layer saw of a dense pass: n tokens of a prompt, then T steps of a token each.

    keys, values    [B, H, n + T, D]
    heads           [T, B, H, G, D], the steps' queries
    prompt_queries  [B, H * G, n, D], None where nobody asks for them
    """

    prompt_tokens: int
    keys: Tensor
    values: Tensor
    heads: Tensor
    prompt_queries: Tensor | None = None

    @property
    def steps(self) -> int:
        return len(self.heads)

    def prompt(self) -> tuple[Tensor, Tensor, Tensor]:
        """The prompt's keys and values [B, H, n, D] and queries [B, H * G, n, D], zeros where they were not kept."""
        keys, values = (rows[:, :, : self.prompt_tokens].contiguous() for rows in (self.keys, self.values))
        queries = self.prompt_queries
        if queries is None:
            batch, _, tokens, dim = keys.shape
            query_heads = self.heads.shape[2] * self.heads.shape[3]
            queries = keys.new_zeros(()).expand(batch, query_heads, tokens, dim)
        return keys, values, queries

    def history(self, step: int) -> tuple[Tensor, Tensor]:
        """Keys and values of everything that a step attends to, its own token included."""
        stop = self.prompt_tokens + step + 1
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class PassThrough(Sampler):
    """Stands where tokens are sampled, and hands on the logits [B, V]: the next token is known."""

    def __init__(self) -> None:
        super().__init__(GenerationConfig(), batch=1)

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        return logits


class Clock:
    """Seconds of several pieces of work on a device, which are over when they are over there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what happens inside."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds.append(time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def replay_layer(
    trace: LayerTrace, state: RequestState, info: LayerInfo, top_k: int, first: int = 0
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """What `measure` says of one layer's steps from `first` on: (step, measures).

    state  a request that has a pipeline for the layer and holds nothing, as it does again afterwards
    top_k  K of both recalls
    """
    layer = filled_layer(trace, state, info)
    for step, heads in enumerate(trace.heads):
        keys, values = trace.history(step)
        layer.append(keys[:, :, -1:], values[:, :, -1:])
        with noted(f"at replayed step {step + 1}"):
            seen = observe(layer, heads)
        if step >= first:
            lengths = [keys.shape[2]] * info.batch
            query = Query(heads, None, info.scaling, info.softcap)
            truth = dense_truth(query, keys, values, lengths, layer.zones, layer.window.sink)
            yield step, measure(truth, seen, top_k)
        state.end_step()
    state.reset()


@torch.no_grad()
def filled_layer(trace: LayerTrace, state: RequestState, info: LayerInfo) -> LayerState:
    """One layer of a request that holds nothing, once it has read the trace's prompt."""
    state.begin_prefill(trace.prompt_tokens, trace.steps)
    layer = state.layer(info)
    keys, values, queries = trace.prompt()
    layer.append(keys, values)
    layer.chunk_attended(queries, None)
    state.end_prefill()
    return layer


def observe(layer: LayerState, heads: Tensor) -> Observed:
    """Attention of the queries [B, H, G, D] as a decode step does it, with what the stages chose.

    Raises PluginContractError for a position outside of the zone, before it is fetched.
    """
    original, proposed, fetched = layer.pipeline, [], []

    def coarse_select(query: Query, codes: Codes, budget: Budget) -> Selection:
        assert original.coarse_select is not None
        selection = original.coarse_select(query, codes, budget)
        proposed.append(selection.indices.clone())
        return selection

    def fetch(selection: Selection, store: Store, slots: Tensor) -> Selected:
        assert original.fetch is not None
        refuse_outside(selection.indices, layer.zones, f"the selection of layer {layer.info.index}")
        fetched.append(replace(selection, indices=selection.indices.clone()))
        return original.fetch(selection, store, slots)

    if layer.retrieves:
        layer.pipeline = replace(original, coarse_select=coarse_select, fetch=fetch)
    try:
        out, _ = attend_layer(layer, heads)
    finally:
        layer.pipeline = original
    return Observed(proposed[0] if proposed else None, fetched[0] if fetched else None, out)


def fitting_top_k(layers: Sequence[tuple[LayerState, LayerTrace]], rows: int) -> int:
    """The largest top_k at which layers that have read their prompt fetch `rows` distinct rows a head on average.

    For methods whose query heads choose apart: what G heads choose together is between top_k and G x top_k rows.
    """
    low, high = max(1, rows // layers[0][0].info.group), rows
    while low < high:
        middle = (low + high + 1) // 2
        fetched = [_distinct_rows(layer, trace, middle) for layer, trace in layers]
        low, high = (middle, high) if sum(fetched) <= rows * len(fetched) else (low, middle - 1)
    return low


def _distinct_rows(layer: LayerState, trace: LayerTrace, top_k: int) -> float:
    """Distinct rows a key/value head that the trace's first steps fetch with this top_k."""
    rule = layer.pipeline.candidates
    assert layer.store is not None
    counts = torch.tensor([rule.count(zone, top_k) for zone in layer.zones], dtype=torch.int32)
    layer.pipeline = replace(layer.pipeline, top_k=top_k)
    layer.zone.budget = Budget(rule.width(layer.store.capacity, top_k), counts.to(layer.info.device))
    chosen = [observe(layer, heads).selection for heads in trace.heads[:PROBED_STEPS]]
    return sum(float((one.indices >= 0).sum(-1).double().mean()) for one in chosen if one is not None) / len(chosen)


@dataclass
class Tape:
    """What `encode` and `fit` returned while a request read a prompt, for a second request that reads the same.

    By contract both depend on the prompt alone, and they are most of what some methods take. A `fit` that returns
    nothing has taught the layer's store instead, and runs again.
    """

    kept: dict[tuple[int, str], list[Tensors]] = field(default_factory=dict)
    is_recording: bool = True

    def record(self, state: RequestState) -> None:
        """Keep what a new request's encoders return, until `is_recording` is taken back."""
        self._wrap(state, self._recording)

    def play(self, state: RequestState) -> None:
        """Let another request's encoders return it, as long as there is some."""
        self._wrap(state, self._playing)

    def _wrap(self, state: RequestState, wrap: Callable[[Learn, tuple[int, str]], Learn]) -> None:
        for index, pipeline in state.pipelines.items():
            encoders = [
                replace(
                    one,
                    encode=wrap(one.encode, (index, f"{one.name} encode")),
                    fit=None if one.fit is None else wrap(one.fit, (index, f"{one.name} fit")),
                )
                for one in pipeline.encoders
            ]
            state.pipelines[index] = replace(pipeline, encoders=tuple(encoders))

    def _recording(self, function: Learn, key: tuple[int, str]) -> Learn:
        def recorded(*arguments: Any) -> Tensors:
            found = function(*arguments)
            if self.is_recording and found:
                self.kept.setdefault(key, []).append(found)
            return found

        return recorded

    def _playing(self, function: Learn, key: tuple[int, str]) -> Learn:
        left = iter(self.kept.get(key, ()))

        def played(*arguments: Any) -> Tensors:
            found = next(left, None)
            return function(*arguments) if found is None else found

        return played
