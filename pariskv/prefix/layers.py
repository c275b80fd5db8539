"""One layer of a live cache as parts of a prefix's file, and back.

    describe     the sizes of what a layer holds, as JSON
    prepare      gives a new layer these sizes
    layer_parts  the tensors, of a live layer to be saved as of a prepared one to be filled
    finish       has a filled layer ready to decode

Rows are in the file token by token, [n, H, 2, D], whatever the store's order: what is read from the disk in one piece
is appended to the store in one piece, by the retriever's own `update`. Codes have their token axis in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pariskv.layer import LayerState
from pariskv.prefix.file import Entry
from pariskv.prefix.parts import Part, tensor_part
from pariskv.prompt import QueryStatistics, ZoneRotary
from pariskv.types import CodeField
from pariskv.working import DeviceRows


def prefix_of(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"layers.{index}"


# What a layer holds beside tensors


def describe(layer: LayerState) -> dict[str, Any]:
    """Sizes and lengths, all that `prepare` has to know beside the tensors' shapes."""
    assert layer.device is not None
    queries = layer.queries
    return {
        "lengths": layer.lengths,
        "zones": layer.zones,
        "ring": layer.device.ring,
        "has_rows": layer.store is not None and layer.store.keeps_rows,
        "states": {name: sorted(state) for name, state in layer.zone.states.items()},
        "store_state": [] if layer.store is None else sorted(layer.store.state()),
        "fitted": {name: sorted(rows.items()) for name, rows in layer.zone.fitted.items()},
        "queries": None if queries is None else [[rest.shape[2] for rest in queries._waiting], queries._seen],
    }


def prepare(layer: LayerState, saved: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """Give a new layer the sizes of a saved one: room in store, codes and states, sink and ring on the device.

    entries  the file's tensors; states and the store's own have the shapes that they say
    """
    layer.lengths, layer.zone.lengths = list(saved["lengths"]), list(saved["zones"])
    layer.columns = layer.request.prompt_tokens
    if any(layer.zones):
        layer.zone.reserve(max(layer.zones), layer.planned_zone)
    for encoder in layer.pipeline.encoders:
        layer.zone.fitted[encoder.name] = dict(map(tuple, saved["fitted"][encoder.name]))
    for name, keys in saved["states"].items():
        layer.zone.states[name] = _empty(f"{prefix_of(layer.info.index)}.state.{name}", keys, layer, entries)
    if saved["queries"] is not None:
        layer.queries = _empty_queries(layer, *saved["queries"])
    needed = max(layer.window.ring_capacity(tokens, tokens + layer.request.new_tokens) for tokens in layer.lengths)
    ring = max(needed, saved["ring"])
    layer.device = DeviceRows(layer.info, layer.window, ring, layer.pipeline.slots(layer.info.group))


def _empty(where: str, keys: list[str], layer: LayerState, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Room for tensors of the file, by their keys."""
    found = {key: entries[f"{where}.{key}"] for key in keys}
    device = layer.info.device
    return {key: torch.zeros(entry.shape, dtype=entry.dtype, device=device) for key, entry in found.items()}


def _empty_queries(layer: LayerState, waiting: list[int], seen: list[int]) -> QueryStatistics:
    info, queries = layer.info, QueryStatistics(layer.info, layer.window)
    queries._seen = list(seen)
    queries._waiting = [
        torch.zeros(info.kv_heads, info.group, rest, info.head_dim, dtype=info.dtype, device=info.device)
        for rest in waiting
    ]
    return queries


def store_state(layer: LayerState, saved: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Room for what the saved store held beside its rows."""
    return _empty(f"{prefix_of(layer.info.index)}.store", saved["store_state"], layer, entries)


def finish(layer: LayerState, state: Mapping[str, Tensor]) -> None:
    """Publish what was filled; state: what the store held beside rows."""
    if layer.store is not None and state:
        rotary = layer.request.rotary
        layer.store.restore(state, ZoneRotary(rotary, layer.window.sink) if rotary else None)
    layer._publish()


# Its tensors


def layer_parts(layer: LayerState, state: Mapping[str, Tensor], has_rows: bool) -> Iterator[Part]:
    """Everything that a layer holds.

    state     what its store holds beside rows: `Store.state()`, or room for it
    has_rows  the file has the zone's rows; without them a store is told their number only
    """
    name = prefix_of(layer.info.index)
    for row, (tokens, zone) in enumerate(zip(layer.lengths, layer.zones, strict=True)):
        yield _steady(layer, f"{name}.steady.{row}", row, tokens - zone)
        if zone and has_rows:
            yield _zone(layer, f"{name}.zone.{row}", row, zone)
        if zone:
            for encoder, codes in layer.codes.items():
                for key, field in codes.spec.items():
                    yield _codes(f"{name}.codes.{encoder}.{key}.{row}", codes[key][row], field, zone)
    for encoder, states in layer.zone.states.items():
        yield from (tensor_part(f"{name}.state.{encoder}.{key}", tensor) for key, tensor in states.items())
    yield from (tensor_part(f"{name}.store.{key}", tensor) for key, tensor in state.items())
    if layer.queries is not None:
        yield tensor_part(f"{name}.queries.moment", layer.queries.moment)
        yield tensor_part(f"{name}.queries.recent", layer.queries.recent)
        for row, rest in enumerate(layer.queries._waiting):
            yield tensor_part(f"{name}.queries.rest.{row}", rest)
    if (moment := layer.request.moments.get(layer.info.index)) is not None and _wants_moment(layer):
        yield tensor_part(f"{name}.model_moment", moment)


def _wants_moment(layer: LayerState) -> bool:
    return any("model_moment" in encoder.needs for encoder in layer.pipeline.encoders)


def _steady(layer: LayerState, name: str, row: int, tokens: int) -> Part:
    """Sink, then ring [n, H, 2, D]."""
    device, info = layer.device, layer.info
    assert device is not None
    first = min(layer.window.sink, layer.lengths[row])

    def positions(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, position of the first), on either side of the zone."""
        for low, high, gap in ((0, first, 0), (first, tokens, layer.zones[row])):
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield a, b, a + gap

    def read(start: int, stop: int) -> Tensor:
        found = [device.read(row, position, position + b - a) for a, b, position in positions(start, stop)]
        return torch.cat(found, dim=1).transpose(0, 1)

    def write(start: int, entries: Tensor) -> None:
        for a, b, position in positions(start, start + len(entries)):
            device.place(row, position, entries[a - start : b - start].transpose(0, 1).to(info.device))

    return Part(name, (tokens, info.kv_heads, 2, info.head_dim), info.dtype, read, write)


def _zone(layer: LayerState, name: str, row: int, tokens: int) -> Part:
    """The zone's rows [n, H, 2, D]."""
    store, update, info = layer.store, layer.pipeline.update, layer.info
    assert store is not None
    assert update is not None

    def read(start: int, stop: int) -> Tensor:
        rows = torch.empty(stop - start, info.kv_heads, 2, info.head_dim, dtype=info.dtype, device=info.device)
        for half, found in enumerate(store.read(row, start, stop)):
            rows[:, :, half] = found.transpose(0, 1)
        return rows

    def write(start: int, entries: Tensor) -> None:
        keys, values = entries.to(info.device).transpose(0, 1).unsqueeze(0).unbind(3)
        update(keys, values, store, [row])

    return Part(name, (tokens, info.kv_heads, 2, info.head_dim), info.dtype, read, write)


def count_only(layer: LayerState) -> None:
    """Tell a store that keeps no rows how many there were."""
    for row, zone in enumerate(layer.zones):
        if zone:
            layer.zone.count_only(row, zone)


def _codes(name: str, whole: Tensor, field: CodeField, zone: int) -> Part:
    """One row's field [H, ...] of a format: its tokens in front, a sum as it is."""
    if field.reduce == "sum":
        return tensor_part(name, whole)
    axis = field.token_axis - 1
    entries = field.size(1, 1, zone)[field.token_axis]
    return tensor_part(name, whole.narrow(axis, 0, entries).movedim(axis, 0))
