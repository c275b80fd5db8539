"""A ParisCache as parts of a prefix's file, and back: our layers, and transformers' own beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pariskv.binding import LayerPipeline
from pariskv.errors import PrefixError
from pariskv.integrations.paris_layer import ParisLayer
from pariskv.integrations.stock_rows import STOCK
from pariskv.integrations.transformers import ParisCache
from pariskv.layer import LayerState
from pariskv.prefix import layers
from pariskv.prefix.file import PrefixFile
from pariskv.prefix.parts import Part, tensor_part

SELECTING = ("coarse_select", "rerank")


# What a cache belongs to


def belongs_to(cache: ParisCache) -> dict[str, Any]:
    """The retrievers with their options, and of each layer its sizes, window, stages and budget.

    Stores and attention are left out, because rows are the same in all of them; but for a store with a state.
    """
    ours = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, ParisLayer)}
    described = {str(index): _layer(cache, index) for index in ours}
    stock = {str(index): type(layer).__name__ for index, layer in enumerate(cache.layers) if index not in ours}
    names = {name for layer in described.values() for name in (*layer["stages"].values(), *layer["codes"])}
    return {
        "layers": {**described, **{index: {"kind": kind} for index, kind in stock.items()}},
        "retrievers": {name: _retriever(cache, name) for name in sorted(names)},
    }


def _layer(cache: ParisCache, index: int) -> dict[str, Any]:
    pipeline, info = cache.request.pipelines[index], cache.geometry.expected_info(index, 1)
    window, dense_below = cache.planner.windows[index], cache.config.window.dense_below
    rule = [[start, str(ratio)] for start, ratio in pipeline.candidates.ratios], pipeline.candidates.minimum
    return {
        "kind": "retrieval",
        "heads": [info.kv_heads, info.group, info.head_dim],
        "scaling": [info.scaling, info.softcap],
        "window": {"sink": window.sink, "local": window.local, "update": window.update, "dense_below": dense_below},
        "indexes": pipeline.indexes,
        "stages": {stage: pipeline.names[stage] for stage in SELECTING if stage in pipeline.names},
        "codes": {encoder.name: [encoder.format, encoder.block] for encoder in pipeline.encoders},
        "top_k": pipeline.top_k,
        "candidates": list(rule),
    }


def _retriever(cache: ParisCache, name: str) -> dict[str, Any]:
    """Type and options, with the defaults of those that the configuration does not name."""
    given = dict(cache.config.retrievers.get(name, {}))
    kind = str(given.pop("type", name))
    options: Any = cache.registry.check(kind, given, name)
    # As JSON gives them back: a tuple is a list there.
    return {"type": kind, "options": json.loads(json.dumps(asdict(options) if options else {}, default=str))}


def store_of(cache: ParisCache, pipeline: LayerPipeline) -> dict[str, Any]:
    """Whose store a layer has."""
    return _retriever(cache, pipeline.names["allocate_store"])


# What it holds


def settle(cache: ParisCache) -> None:
    """Bring a cache between two steps, as the next step would.

    Raises PrefixError for one that holds nothing, or layers that cannot be saved.
    """
    if not cache.get_seq_length():
        raise PrefixError("the cache holds no token yet; read a prompt first")
    cache.end_step()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ParisLayer):
            assert layer.state is not None
            layer.refuse_unattended()
            if not layer.state.decoding:
                layer.state.end_prefill()
        elif type(layer) not in STOCK:
            raise PrefixError(f"layer {index}: a {type(layer).__name__} of transformers cannot be saved")
    if not all(all(layer.active_rows) for layer in cache.request.layers.values()):
        raise PrefixError("a row has ended, and what followed it is padding; save before that, or the other rows alone")


def describe(cache: ParisCache) -> dict[str, Any]:
    """Lengths and sizes of what the layers hold."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ParisLayer):
            assert layer.state is not None
            found[str(index)] = layers.describe(layer.state)
            if found[str(index)]["store_state"]:
                found[str(index)]["store"] = store_of(cache, layer.state.pipeline)
        else:
            found[str(index)] = {"columns": _stock(layer).get_seq_length()}
    return found


def parts_of(cache: ParisCache) -> Iterator[Part]:
    """The tensors of a settled cache."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ParisLayer):
            assert layer.state is not None
            store = layer.state.store
            state, has_rows = (store.state(), store.keeps_rows) if store is not None else ({}, False)
            yield from layers.layer_parts(layer.state, state, has_rows)
        else:
            yield from _stock_parts(index, _stock(layer))


def _stock(layer: object) -> DynamicLayer:
    assert isinstance(layer, STOCK), "settle has refused the others"
    return layer


def _stock_parts(index: int, layer: DynamicLayer) -> Iterator[Part]:
    """Keys and values [n, B, H, D] of a layer that transformers keeps."""
    for name in ("keys", "values"):
        tensor: Tensor = getattr(layer, name)
        yield tensor_part(f"{layers.prefix_of(index)}.{name}", tensor.movedim(2, 0))


class Filling:
    """An empty cache that takes a saved one's sizes: its `parts` are to be filled from the file, then `finish`.

    new_tokens  that will be generated after it
    """

    def __init__(self, cache: ParisCache, file: PrefixFile, new_tokens: int):
        self.cache, self.file, self.parts = cache, file, list[Part]()
        self._states: list[tuple[LayerState, Mapping[str, Tensor], bool]] = []
        cache.request.begin_prefill(file.header["held"]["columns"], new_tokens)
        cache.request.request.prefilling = False
        self._take_moments()
        for index, layer in enumerate(cache.layers):
            held = file.header["held"]["layers"][str(index)]
            if isinstance(layer, ParisLayer):
                self._prepare(index, layer, held)
            else:
                self._prepare_stock(index, _stock(layer), held["columns"])

    def _take_moments(self) -> None:
        """What the model's calibration said where the prefix was read, not what it says here: formats are refitted."""
        names = {index: f"{layers.prefix_of(index)}.model_moment" for index in self.cache.request.pipelines}
        self.cache.request.request.moments = {
            index: self._room(name) for index, name in names.items() if name in self.file.tensors
        }

    def _room(self, name: str) -> Tensor:
        entry = self.file.tensors[name]
        return torch.zeros(entry.shape, dtype=entry.dtype, device=self.cache.geometry.device)

    def _prepare(self, index: int, layer: ParisLayer, held: Mapping[str, Any]) -> None:
        rows, entries = len(held["lengths"]), self.file.tensors
        info = self.cache.geometry.expected_info(index, rows)
        nothing = torch.empty(rows, info.kv_heads, 0, info.head_dim, dtype=info.dtype, device=info.device)
        layer.lazy_initialization(nothing, nothing)
        layer.columns = self.file.header["held"]["columns"]
        assert layer.state is not None
        layers.prepare(layer.state, held, entries)
        store = layer.state.store
        if store is not None and not held["has_rows"] and store.keeps_rows:
            raise self.file.refusal(
                f"layers.{index}.store",
                f"saved from a store that keeps no rows, but the one here ({type(store).__name__}) must have them; "
                f"load it with the store it was saved with, such as `store: evict`",
            )
        state = layers.store_state(layer.state, held, entries)
        self._states.append((layer.state, state, bool(held["has_rows"])))
        self.parts += layers.layer_parts(layer.state, state, bool(held["has_rows"]))

    def _prepare_stock(self, index: int, layer: DynamicLayer, columns: int) -> None:
        keys, values = (self._room(f"{layers.prefix_of(index)}.{name}").movedim(0, 2) for name in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = columns
        self.parts += _stock_parts(index, layer)

    def finish(self) -> None:
        """Have the filled cache ready to decode."""
        for layer, state, has_rows in self._states:
            if layer.store is not None and not has_rows:
                layers.count_only(layer)
            layers.finish(layer, state)
