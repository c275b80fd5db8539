"""`pariskv bench layer`: one layer's retrieval and attention, beside dense SDPA at the same length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from pariskv.bench.dense import Dense, measure_dense
from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, refuse_layers, release
from pariskv.bench.synthetic import (
    DecodeSteps,
    LayerSizes,
    bench_config,
    bench_pipeline,
    layers_for,
    mean_overlap,
    mix_for_overlap,
    query_sequence,
    selected_indices,
)
from pariskv.bench.timing import Timer
from pariskv.filling import filled_layer
from pariskv.layer import LayerState

CALIBRATION_STEPS = 4


@dataclass(frozen=True)
class Settings(LayerSizes):
    """What to measure: every combination."""

    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    top_ks: tuple[int, ...]
    stores: tuple[str, ...]
    candidates: str | int | float
    overlap: float = 0.7  # of the rows of consecutive steps
    overrides: tuple[str, ...] = ()  # of the configuration, `key=value`

    @property
    def num_rows(self) -> int:
        return len(self.tokens) * len(self.batches) * len(self.top_ks) * len(self.stores)


def measure(settings: Settings, timer: Timer, measured: dict[str, Any]) -> Iterator[Row]:
    """The rows, one by one; which backend `dense` is goes into `measured`."""
    for tokens, batch in product(settings.tokens, settings.batches):
        dense = measure_dense(timer, settings.info(0, batch, timer.device), tokens, measured)
        for top_k, store in product(settings.top_ks, settings.stores):
            row = _Case(settings, timer, tokens, batch, top_k, store).row(dense)
            release(timer.device)
            yield row


@dataclass(frozen=True)
class _Case:
    """One row's layers and what is measured on them."""

    settings: Settings
    timer: Timer
    tokens: int
    batch: int
    top_k: int
    store: str

    @property
    def reuses(self) -> bool:
        return self.store == "uva reuse"

    def row(self, dense: Dense) -> Row:
        values: dict[str, Any] = {}
        why = [dense.why] if dense.why else []
        try:
            values = self._values()
        except TOO_LARGE as error:
            why.append(f"{self.store}: {reason(error)}")
        us, dense_us = values.get("us"), dense.best_us
        return make_row(
            "layer",
            "; ".join(why) or None,
            tokens=self.tokens,
            batch=self.batch,
            top_k=self.top_k,
            store=self.store,
            dense_us=dense_us,
            ratio=us / dense_us if us and dense_us else None,
            **values,
        )

    def _values(self) -> dict[str, Any]:
        layers = self._layers()
        mix = mix_for_overlap(partial(_overlap_at, layers[0]), self.settings.overlap)
        steps = DecodeSteps(layers, mix, self.timer.runs)
        store: Any = layers[0].store

        def before(run: int) -> None:
            steps.before(run)
            if run == 1 and self.reuses:
                store.counts.zero_()  # what was fetched until now were not consecutive steps

        seconds = self.timer.seconds(steps.calls, before)
        return {
            "us": 1e6 * seconds,
            "hit_rate": float(store.hit_rate) if self.reuses else None,
            "overlap": _overlap_of(layers[0], steps.sequence[:, 0]),
        }

    def _layers(self) -> list[LayerState]:
        """As many filled layers as it takes for what a step reads of their codes to exceed the L2.

        Raises CapacityError where they do not fit.
        """
        settings, device = self.settings, self.timer.device
        config = bench_config(self.store, self.top_k, settings.candidates, settings.overrides)
        pipeline, window = bench_pipeline(config, device)
        first = settings.info(0, self.batch, device)
        count = layers_for(first, self.tokens, self.timer)
        refuse_layers(first, pipeline, window, self.tokens, count, in_host=self.store != "resident")
        return [
            filled_layer(settings.info(index, self.batch, device), pipeline, window, self.tokens)
            for index in range(count)
        ]


def _overlap_at(layer: LayerState, mix: float) -> float:
    """The overlap of a few steps whose queries are mixed like this."""
    return _overlap_of(layer, query_sequence(layer.info, mix, CALIBRATION_STEPS))


def _overlap_of(layer: LayerState, queries: Tensor) -> float:
    return mean_overlap([selected_indices(layer, heads) for heads in queries])
