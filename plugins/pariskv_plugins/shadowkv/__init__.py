"""ShadowKV (arXiv 2410.21465): chunks found by their landmarks, keys kept at low rank, values offloaded.

landmarks.py  chunks' mean keys and how well they stand for their members; queries to chunks
lowrank.py    the store: values in host memory, keys rebuilt from the SVD of the prompt's keys before RoPE
outliers.py   the chunks whose keys stay as they came
vectors.py    vectors in whatever store keeps rows

`keys: low_rank` is the published method. It needs keys before the rotary embedding, and is refused where a model
cannot give them. `keys: store` (ours) selects alike and attends the exact keys of whatever store the layer has.
Generated tokens stay in the dense part, as published; `generated: true` (ours) indexes them like the prompt's, their
keys on the basis of the prompt's.

Where this departs from the paper:

- Outlier chunks come out of the budget, which counts all fetched rows, not on top of it. So they are at most 24 per
  1,024 tokens of the budget (the published 48 from 2,048 on), a rule that one of the paper's two classes has, too.
- The exact keys stay in host memory for later turns; the device has no use for them and they are never fetched.
- Chunks that the step before had selected, too, are fetched again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import Budget, Codes, LayerInfo, Prefill, Query, Selected, Selection, Store, Tensors
from pariskv_plugins.shadowkv.landmarks import encode_chunks, fields, select_chunks
from pariskv_plugins.shadowkv.lowrank import ShadowStore, own

LOW_RANK, STORE = "low_rank", "store"


@dataclass(frozen=True)
class Options:
    chunk: int = 8  # tokens per landmark
    outliers: int = 48  # chunks that their landmark stands for worst: exact and always selected, as the budget allows
    keys: str = LOW_RANK  # low_rank: rebuilt on the device, only values are fetched; store: the store's own
    rank: int = 160  # of the keys of all heads together, before RoPE
    offload: bool = True  # values in host memory where the layer is on a GPU
    generated: bool = False  # ours: index generated tokens


class Landmarks(Retriever):
    """Selects whole chunks by their landmarks, and the chunks that have outliers. A row's keys are its store's."""

    graph_safe = True
    combine = "max_softmax"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        check_options(self.options)
        self.block = self.options.chunk
        self.format = f"landmarks-{self.options.chunk}"
        self.indexes = "all" if self.options.generated else "prompt"

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity, **fields(layer, self.options.chunk))

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return encode_chunks(keys, self.options.chunk)

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        return select_chunks(query, codes, budget, self.options.chunk, self.options.outliers)


class ShadowKV(Landmarks):
    """The whole method: what `Landmarks` selects, from a store that rebuilds keys and fetches values."""

    needs = frozenset({"pre_rope"})

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.host_resident = self.options.offload

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        """Teach the store each row's basis; the landmarks need nothing, and neither does another retriever's store."""
        if isinstance(prefill.store, ShadowStore):
            for row, length in enumerate(prefill.lengths):
                if length:
                    prefill.store.learn(row, prefill)
        return {}

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        options = self.options
        return ShadowStore(layer, capacity, options.rank, options.chunk, options.outliers, options.offload)

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        return own(store).fetch(selection, slots)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        own(store).append(keys, values, rows)


def check_options(options: Options) -> None:
    """Raise ConfigError for the first option that means nothing."""
    for name, least in (("chunk", 1), ("outliers", 0), ("rank", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"shadowkv: {name}={getattr(options, name)}; set it to {least} or more")
    if options.keys not in (LOW_RANK, STORE):
        raise ConfigError(f"shadowkv: keys={options.keys!r}; set it to {LOW_RANK} or {STORE}")


def make(options: Options | None = None) -> Landmarks:
    """The retriever that the option `keys` asks for."""
    options = options or Options()
    return Landmarks(options) if options.keys == STORE else ShadowKV(options)


@hookimpl
def register_retrievers(register: Register) -> None:
    register("shadowkv", make, options=Options)
