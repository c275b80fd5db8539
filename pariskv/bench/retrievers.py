"""`pariskv bench retrievers`: one layer's decode step by every method, placed as published, beside dense SDPA.

START READING AT `published`: how each method is run. A method whose stages are all graph-safe is timed in a graph, as
`bench layer` times; another one eagerly, by the host's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from pariskv.bench.dense import Dense, measure_dense
from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, refuse_layers, release
from pariskv.bench.synthetic import DecodeSteps, LayerSizes, bench_pipeline, layers_for
from pariskv.bench.timing import EagerTimer, Timer
from pariskv.binding import LayerPipeline
from pariskv.config import Config, parse_config
from pariskv.errors import CapacityError
from pariskv.filling import filled_layer
from pariskv.layer import LayerState
from pariskv.metrics import index_bytes_per_token
from pariskv.replay import Clock
from pariskv.types import LayerInfo
from pariskv.units import show_tokens
from pariskv.window import Window

SEGMENT, SEGMENT_FROM = 8192, 1 << 17
"""Tokens that share MagicPIG's hash tables, and from which length of the history on there are tables."""


@dataclass(frozen=True)
class Method:
    """How a retriever is run.

    store      the instance that keeps its rows, unless the retriever brings its own; auto: `uva` on a GPU
    placement  where index, rows and attention are; `{device}` is GPU or CPU, `{rows}` where the store keeps rows
    options    the retriever's, where they are not its defaults
    """

    store: str = "auto"
    placement: str = "index {device}, rows {rows}, attention {device}"
    options: dict[str, Any] = field(default_factory=dict)


def published(name: str, tokens: int, top_k: int) -> Method:
    """A method with the placement of its paper; with the defaults of `Method` where it is not listed here."""
    methods = {
        "quest": Method("resident"),
        "pqcache": Method("host"),
        "retroinfer": Method(options={"exact": 0.018}),
        "shadowkv": Method(placement="index, low-rank keys {device}, values {rows}, attention {device}"),
        "magicpig": Method(
            placement="index, rows, attention CPU", options={"segment": SEGMENT if tokens >= SEGMENT_FROM else 0}
        ),
        "snapkv": Method("resident", options={"keep": top_k}),
        "window": Method("evict", "no index, rows dropped, attention {device}"),
    }
    return methods.get(name, Method())


ROWS = {
    "resident": "GPU",
    "uva": "host (read by the GPU)",
    "shadowkv": "host (read by the GPU)",
    "host": "host (gathered by the CPU)",
}
"""Where a store keeps its rows, beside a GPU."""


def placement(method: Method, pipeline: LayerPipeline, device: torch.device) -> str:
    """In a few words where index, rows and attention are."""
    store = pipeline.names.get("allocate_store", "")
    name = "GPU" if device.type == "cuda" else "CPU"
    return method.placement.format(device=name, rows=ROWS.get(store, store) if name == "GPU" else name)


@dataclass(frozen=True)
class Settings(LayerSizes):
    """What to measure: every combination of retrievers, tokens and batches.

    top_k  rows that are fetched per key/value head
    steps  of the eager ones, of which the median is taken
    """

    retrievers: tuple[str, ...]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    top_k: int
    candidates: str | int | float
    steps: int = 20

    @property
    def num_rows(self) -> int:
        return len(self.retrievers) * len(self.tokens) * len(self.batches)

    def config(self, name: str, tokens: int) -> Config:
        """One method in every layer, the window at its defaults."""
        method = published(name, tokens, self.top_k)
        layer = {"retriever": name, "candidates": self.candidates, "top_k": self.top_k}
        retrievers = {name: method.options} if method.options else {}
        return parse_config({"store": method.store, "retrievers": retrievers, "layers": {"default": layer}})

    def pipeline(self, name: str, tokens: int, device: torch.device) -> tuple[LayerPipeline, Window]:
        """The bound method; where query heads choose apart, each has its part of the rows, so that none is over."""
        pipeline, window = bench_pipeline(self.config(name, tokens), device)
        if pipeline.per_query_head:
            pipeline = replace(pipeline, top_k=max(1, self.top_k // self.group))
        return pipeline, window


def measure(settings: Settings, timer: Timer, measured: dict[str, Any]) -> Iterator[Row]:
    """The rows, one by one; which backend `dense` is goes into `measured`."""
    for name in settings.retrievers:
        settings.pipeline(name, settings.tokens[0], timer.device)  # what cannot be bound is refused before all else
    for tokens, batch in product(settings.tokens, settings.batches):
        dense = measure_dense(timer, settings.info(0, batch, timer.device), tokens, measured)
        for name in settings.retrievers:
            row = _Case(settings, timer, name, tokens, batch).row(dense)
            release(timer.device)
            yield row


@dataclass(frozen=True)
class _Case:
    """One row's layers and what is measured on them."""

    settings: Settings
    timer: Timer
    name: str
    tokens: int
    batch: int

    def row(self, dense: Dense) -> Row:
        settings, device = self.settings, self.timer.device
        pipeline, window = settings.pipeline(self.name, self.tokens, device)
        method = published(self.name, self.tokens, settings.top_k)
        found: dict[str, Any] = {}
        why = [dense.why] if dense.why else []
        try:
            found = self._found(pipeline, window)
        except TOO_LARGE as error:
            why.append(f"{self.name}: {reason(error)}")
        us, dense_us = found.get("us"), dense.best_us
        return make_row(
            "retrievers",
            "; ".join(why) or None,
            retriever=self.name,
            tokens=self.tokens,
            batch=self.batch,
            top_k=settings.top_k,
            placement=placement(method, pipeline, device),
            captured=pipeline.graph_safe,
            dense_us=dense_us,
            ratio=us / dense_us if us and dense_us else None,
            **found,
        )

    def _found(self, pipeline: LayerPipeline, window: Window) -> dict[str, Any]:
        timer: Timer = self.timer
        if not pipeline.graph_safe:
            timer = EagerTimer(timer.device, self.settings.steps)
        layers, fill_s = self._layers(pipeline, window, timer)
        steps = DecodeSteps(layers, 0.0, timer.runs)
        return {
            "us": 1e6 * timer.seconds(steps.calls, steps.before),
            "index_bytes_per_token": index_bytes_per_token(layers),
            "fill_s": fill_s,
        }

    def _layers(self, pipeline: LayerPipeline, window: Window, timer: Timer) -> tuple[list[LayerState], float]:
        """Filled layers, one for an eager step, and the seconds that the last of them took.

        Raises CapacityError where they do not fit, and where there is nothing to retrieve from.
        """
        settings, device, clock = self.settings, timer.device, Clock(timer.device)
        if pipeline.coarse_select is not None and not window.zone(self.tokens):
            raise CapacityError(f"{show_tokens(self.tokens)} tokens are all attended to: too few to retrieve from")
        first = settings.info(0, self.batch, device)
        count = layers_for(first, self.tokens, timer)
        hosted = are_codes_hosted(first, pipeline)
        refuse_layers(first, pipeline, window, self.tokens, count, pipeline.host_resident, hosted)
        layers = []
        for index in range(count):
            with clock.running():
                layers.append(filled_layer(settings.info(index, self.batch, device), pipeline, window, self.tokens))
        return layers, clock.seconds[-1]


def are_codes_hosted(info: LayerInfo, pipeline: LayerPipeline) -> bool:
    """Whether some codes are elsewhere than on the layer's device; asks for those of one block."""
    made = [encoder.allocate_codes(info, encoder.block) for encoder in pipeline.encoders]
    return any(one.device.type != info.device.type for codes in made for one in codes.fields.values())
