"""THE CONTRACT: every hook that a retriever can implement.

A retriever is one object with some of the stage hooks below, made by a factory that a plugin
module registers. The core chooses implementations by NAME from the YAML and binds them, once
per layer, to plain functions; no hook is called through pluggy per token.

    register_retrievers     a plugin module names its retrievers
    allocate_codes, encode  a format: empty codes, and codes of a block     (fit, is_stale, encode_query: optional)
    coarse_select, rerank   queries and codes to token positions
    allocate_store, fetch, update   where keys and values live
    attend                  one softmax over sink, ring and selected rows     (append: optional)

Letters and types: see `pariskv.types`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import pluggy
from torch import Tensor

from pariskv.types import (
    Budget,
    Codes,
    LayerInfo,
    Prefill,
    Query,
    Selected,
    Selection,
    Store,
    Tensors,
    WorkingSet,
)

PROJECT = "pariskv"
HOOK_API = 1
"""The version of this page. A plugin states the one that it was written for."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Selecting = Literal["coarse_select", "rerank"]
Need = Literal["query_moment", "model_moment", "recent_queries", "pre_rope"]


class Retriever:
    """What a retriever declares about itself; the base class is a convenience, not a condition."""

    format: str | None = None
    """Name of the codes that `encode` makes, with what a reader must know (`pariskv-m8`)."""
    reads: str | None = None
    """Format that `coarse_select` and `rerank` read; None: the retriever's own."""
    block: int = 1
    """`encode` is only given whole multiples of this many tokens."""
    indexes: Literal["all", "prompt", "none"] = "all"
    """Which tokens ever leave the dense part: all; the prompt's (generated ones stay); none."""
    needs: frozenset[Need] = frozenset()
    """What `fit` wants beside the zone's keys and values."""
    selects_per_query_head: bool = False
    """Query heads choose apart: the selection holds up to G x top_k rows, with a bias."""
    combine: str | None = None
    """How the query heads of a group choose together, for the tables of `pariskv compare`; nothing depends on it.

    `sum_softmax`, the sum of the heads' probabilities; `max_softmax`, the largest of them; `max_logit`, the largest
    score; `mean_query`, the score of the mean query; `per_query_head`, apart. None: an option of that name says it.
    """
    adapts_top_k: bool = False
    """`rerank` may keep fewer than `top_k` rows where a head needs fewer; the others' slots are empty."""
    candidate_ratios: tuple[tuple[int, float], ...] | None = None
    """`candidates: auto` of `coarse_select`: from how many zone tokens on, which share of them; None: the paper's."""
    reads_steady: frozenset[Selecting] = frozenset()
    """Which of `coarse_select` and `rerank` read `query.steady`, which costs a pass over sink and ring."""
    graph_safe: bool = False
    """Fixed shapes, no host synchronisation, lengths and counts read from the device."""
    host_resident: bool = False
    """`allocate_store` takes host memory, wherever the layer is; False: memory of the layer's own device."""


class Register(Protocol):
    """The function that `register_retrievers` receives."""

    def __call__(
        self, name: str, factory: Callable[..., object], *, options: type | None = None, api: int = HOOK_API
    ) -> None:
        """Offer the retriever `name`; `factory(options)` makes it, `factory()` where it has none."""

    def wrapper(self, name: str, factory: Callable[[], object], *, api: int = HOOK_API) -> None:
        """Offer hook wrappers (a profiler, a checker) under `name`, used where YAML says `wrappers: [name]`."""


class PluginSpec:
    """Hooks of a plugin module."""

    @hookspec
    def register_retrievers(self, register: Register) -> None:
        """Call `register(name, factory, options=Dataclass)` for every retriever of the module."""


class StageSpec:
    """Hooks of a retriever. B rows, H key/value heads, G queries per head, D head size."""

    @hookspec(firstresult=True)
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        """Empty codes of one layer for `capacity` tokens a row: `Codes.empty(layer, capacity, name=CodeField(...))`."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        """Optional: what the format learns from the zone, each tensor [B, ...]; frozen until `is_stale` says otherwise.

        Called when the prefill ends, or when a row first has a zone, for the rows that have not learnt anything yet.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def is_stale(self, keys: Tensor, state: Tensors, fitted: list[int], since: list[int]) -> list[bool]:
        """Optional, of a format with `fit`: whose state no longer suits what is generated, a bool for each of R rows.

        Asked between two steps when a block [R, H, n, D] of keys has left for the zone. `state` holds those rows of
        what `fit` returned, `fitted` how many tokens their zones had then, `since` how many have left since. The rows
        that it names are fitted again, and their whole zone is encoded anew from the store, before the next step.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        """Codes of a block: the declared fields, [R, H, ...] for keys and values [R, H, n, D].

        Keys are after RoPE. R are the rows whose block is due; `state` holds those rows of what
        `fit` returned, and is empty without `fit`. Pure: any split of the same keys into aligned
        blocks gives the same bits.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        """Optional: what coarse_select and rerank share of the queries [B, H, G, D], once a step and format."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        """Candidates: indices [B, H, budget.width] in any order, `budget.count[b]` of them used."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        """The best `top_k` of the candidates, all of them where they are fewer; fewer where `adapts_top_k` says so."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        """An empty store for the zone's keys and values of one layer."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        """Write the selected rows into slots [B, H, K, 2, D]; slots in any order, valid says which are used."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        """Append one block [R, H, n, D] of the given batch rows to the store, and count it in `store.length`."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def attend(self, query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
        """One softmax over sink, ring and selected rows: out [B, H, G, D] and log-sum-exp [B, H, G]."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def append(self, keys: Tensor, values: Tensor, working: WorkingSet) -> None:
        """Optional, of the retriever that gives `attend`: the step's own token [B, H, 1, D] to every row's end.

        Its key and value go to the row's next slot, which `steady` marks where the row is active, and the
        active rows' `length` grows by one. Without it the core does the same by torch.
        """
        raise NotImplementedError
