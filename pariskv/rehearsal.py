"""What a layer's stages hold and borrow beyond what can be computed: measured in small layers of random tokens.

`fit` keeps what it likes, `encode` and a step's stages make temporaries of their own. So the planner lets the real
stages run on a CPU, in one layer of the model's sizes and a few lengths, and reads a meter (`pariskv.meter`). Between
the lengths it draws straight lines; the last one goes on beyond the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pariskv.binding import LayerPipeline, bind
from pariskv.config import parse_config
from pariskv.decode import attend_layer
from pariskv.errors import noted
from pariskv.filling import PlainRotary
from pariskv.layer import LayerState
from pariskv.meter import Meter
from pariskv.registry import Registry
from pariskv.request import Request
from pariskv.types import LayerInfo
from pariskv.window import Window

LENGTHS = (1, 256, 1024, 4096, 8192)
"""Tokens of the layers that are rehearsed: of the zone, or of all where there is none. About: updates are whole."""

DOUBLED = 1024
"""The length that two heads and two rows are rehearsed with, too: they say how the figures grow with either."""

REHEARSING = "while rehearsing a layer of its kind on random tokens, to plan the memory"

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Figures:
    """Bytes of one layer; temporaries are what is alive at most beyond what stays.

    queries  held from the first chunk on: what formats learn of the prompt's queries
    taking   temporaries once a chunk has been attended to: `encode`, `update`
    ending   the end of the prefill: temporaries and what it makes, the device's rows among it
    state    held while decoding, beside rows, codes and store: what `fit` keeps, counters
    step     temporaries of a step's stages, and of the `update` between two steps
    """

    queries: int = 0
    taking: int = 0
    ending: int = 0
    state: int = 0
    step: int = 0


@dataclass(frozen=True)
class Curve:
    """Figures by length, for one row of one key/value head, and how they grow with heads and rows.

    lengths  ascending
    by_head  of each figure: that of two heads over that of one, 1 to 2
    by_row   that of two rows over that of one
    """

    lengths: Sequence[int]
    figures: Sequence[Figures]
    by_head: Sequence[float]
    by_row: Sequence[float]

    def at(self, length: int, heads: int, batch: int) -> Figures:
        """The figures of `batch` rows of `heads` heads; none falls where one of the three grows."""
        columns = zip(*map(astuple, self.figures), strict=True)
        figures = zip(columns, self.by_head, self.by_row, strict=True)
        return Figures(
            *(
                round(_line(self.lengths, one, length) * _times(heads, by_head) * _times(batch, by_row))
                for one, by_head, by_row in figures
            )
        )


def _times(many: int, growth: float) -> float:
    return 1 + (many - 1) * (growth - 1)


def _line(places: Sequence[int], values: Sequence[int], place: int) -> float:
    """The broken line through the points, level before the first; its last piece goes on."""
    if place <= places[0] or len(places) == 1:
        return values[0]
    last = next((i for i, one in enumerate(places) if one >= place), len(places) - 1)
    share = (place - places[last - 1]) / (places[last] - places[last - 1])
    return values[last - 1] + share * (values[last] - values[last - 1])


class Rehearsal:
    """The figures of one kind of layer, each curve measured when it is first asked for, in a second or so."""

    def __init__(self, info: LayerInfo, pipeline: LayerPipeline, window: Window):
        self._heads = info.kv_heads
        self._info = replace(info, batch=1, kv_heads=1, device=CPU)
        self._pipeline = on_cpu(pipeline, info.device)
        self._window = window

    def at(self, zone: int, tokens: int, batch: int) -> Figures:
        """Figures of `batch` rows of `tokens` tokens, `zone` of them in the zone."""
        return self._retrieving.at(zone, self._heads, batch) if zone else self._dense.at(tokens, self._heads, batch)

    @cached_property
    def _retrieving(self) -> Curve:
        """By zone tokens."""
        window = replace(self._window, dense_below=0)
        zones = sorted({-(-length // window.update) * window.update for length in LENGTHS})
        doubled = -(-DOUBLED // window.update) * window.update
        steady = window.sink + window.local + window.update - 1  # the step after it is due an update
        return self._curve(window, zones, doubled, steady)

    @cached_property
    def _dense(self) -> Curve:
        """By tokens, of rows without a zone."""
        return self._curve(self._window.without_zone(), LENGTHS, DOUBLED, 0)

    def _curve(self, window: Window, lengths: Sequence[int], doubled: int, more: int) -> Curve:
        def figures(length: int, heads: int = 1, batch: int = 1) -> Figures:
            info = replace(self._info, kv_heads=heads, batch=batch)
            with noted(REHEARSING):
                return measure(info, self._pipeline, window, length + more)

        single = [figures(length) for length in lengths]
        one = figures(doubled)
        heads, rows = (_growth(one, two) for two in (figures(doubled, heads=2), figures(doubled, batch=2)))
        return Curve(lengths, _never_falling(single), heads, rows)


def _growth(one: Figures, two: Figures) -> list[float]:
    pairs = zip(astuple(one), astuple(two), strict=True)
    return [min(2.0, max(1.0, both / alone)) if alone else 1.0 for alone, both in pairs]


def _never_falling(figures: Sequence[Figures]) -> list[Figures]:
    """Each figure at least that of a shorter layer: a longer request must not fit where a shorter one does not."""
    found = [figures[0]]
    for one in figures[1:]:
        found.append(Figures(*map(max, astuple(found[-1]), astuple(one))))
    return found


def on_cpu(pipeline: LayerPipeline, device: torch.device) -> LayerPipeline:
    """The same stages over rows that a CPU can hold, where the layer's own store is beside a GPU."""
    if device.type == "cpu" or not pipeline.host_resident:
        return pipeline
    plain = bind(parse_config({"store": "resident", "layers": {"default": {"retriever": "exact"}}}), 1, Registry.load())
    return replace(pipeline, allocate_store=plain[0].allocate_store, fetch=plain[0].fetch, update=plain[0].update)


@torch.no_grad()
def measure(info: LayerInfo, pipeline: LayerPipeline, window: Window, tokens: int) -> Figures:
    """The figures of a layer that reads `tokens` random tokens as one chunk, and decodes one more."""
    request = Request(
        prompt_tokens=tokens,
        new_tokens=1,
        prefilling=True,
        rotary=PlainRotary(info.head_dim, info.device),
        moments={info.index: torch.eye(info.head_dim).repeat(info.kv_heads, 1, 1)},
    )
    keys, values = (_random(info, info.kv_heads, tokens) for _ in range(2))
    query = _random(info, info.kv_heads * info.group, tokens)
    key, value = (_random(info, info.kv_heads, 1) for _ in range(2))
    heads = query[:, :, -1].reshape(info.batch, info.kv_heads, info.group, info.head_dim)
    with Meter() as meter:
        layer = LayerState(info, pipeline, window, request)
        layer.append(keys, values)
        taking = _borrowed(meter, lambda: layer.chunk_attended(query, None))
        queries = before = meter.live
        queries -= _held(layer)
        meter.restart()
        layer.end_prefill()
        request.prefilling = False
        ending, state = meter.peak - before, meter.live - _held(layer)
        step = _borrowed(meter, lambda: _step(layer, heads, key, value))
    return Figures(max(0, queries), taking, ending, max(0, state), step)


def _random(info: LayerInfo, heads: int, tokens: int) -> Tensor:
    return torch.randn(info.batch, heads, tokens, info.head_dim, dtype=info.dtype)


def _borrowed(meter: Meter, run: Callable[[], object]) -> int:
    """What is alive at most while it runs, beyond what is alive in the end."""
    meter.restart()
    run()
    return meter.peak - meter.live


def _step(layer: LayerState, heads: Tensor, key: Tensor, value: Tensor) -> None:
    layer.append(key, value)
    attend_layer(layer, heads)
    layer.finish_step()


def _held(layer: LayerState) -> int:
    """What is computed, not measured: rows, codes and store."""
    store = layer.store.device_bytes + layer.store.host_bytes if layer.store else 0
    return store + layer.code_bytes + (layer.device.nbytes if layer.device else 0)
