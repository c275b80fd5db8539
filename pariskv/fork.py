"""Requests that begin alike and share what they have in common: a read-only base, and a tail of their own each.

    Base         a store that nobody writes any more, and who reads it
    ForkedStore  a row's first tokens are the base's, what follows is in the tail, which is made when something does
    forked       a layer's stages with `fetch` and `update` that know both

Whoever is forked becomes one of the forks: all of them are alike, and any of them may go on, go back or end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pariskv.binding import AllocateStore, Fetch, LayerPipeline, Update
from pariskv.errors import BindingError, CapacityError
from pariskv.types import LayerInfo, Selected, Selection, Store


class Base:
    """A store that is only read; one of its readers counts its bytes, so that a sum over requests has them once."""

    def __init__(self, store: Store):
        self.store = store
        self._readers: list[weakref.ref[ForkedStore]] = []

    def add(self, reader: ForkedStore) -> None:
        self._readers.append(weakref.ref(reader))

    def is_counted_by(self, reader: ForkedStore) -> bool:
        """Whether it is the first one that is still there."""
        return next((one for ref in self._readers if (one := ref()) is not None), None) is reader


class ForkedStore(Store):
    """The rows of one request of several that share a base.

    shared  of each row, how many of its tokens are the base's
    tail    what follows them; None until something does
    """

    can_fork = True

    def __init__(self, base: Base, shared: Sequence[int], info: LayerInfo, allocate: AllocateStore):
        self.base, self.shared = base, list(shared)
        self.tail: Store | None = None
        self.capacity = max(shared)
        self._info, self._allocate = info, allocate
        self._first = torch.tensor(self.shared, dtype=torch.int32, device=info.device).view(-1, 1, 1)
        base.add(self)

    @property
    def length(self) -> list[int]:  # type: ignore[override]
        own = self.tail.length if self.tail is not None else [0] * len(self.shared)
        return [shared + n for shared, n in zip(self.shared, own, strict=True)]

    @property
    def layout(self) -> object:
        return self.capacity, self.base.store.layout, self.tail and self.tail.layout

    def grow(self, capacity: int) -> None:
        self.capacity = max(self.capacity, capacity)
        self._make_room([self.capacity] * len(self.shared))

    def append(self, update: Update, keys: Tensor, values: Tensor, rows: list[int]) -> None:
        """A block [R, H, n, D] of the rows into the tail, by the retriever's own `update`."""
        tokens, lengths = keys.shape[2], self.length
        full = [row for row in rows if lengths[row] + tokens > self.capacity]
        if full:
            raise CapacityError(
                f"fork: row {full[0]} holds {lengths[full[0]]} of {self.capacity} tokens, and {tokens} more came"
            )
        self._make_room([lengths[row] + tokens if row in rows else 0 for row in range(len(self.shared))])
        assert self.tail is not None
        update(keys, values, self.tail, rows)

    def _make_room(self, tokens: Sequence[int]) -> None:
        """Let the tail hold so many tokens of each row, less those that are shared."""
        own = max(wanted - shared for wanted, shared in zip(tokens, self.shared, strict=True))
        if own <= 0:
            return
        if self.tail is None:
            self.tail = self._allocate(self._info, own)
        else:
            self.tail.grow(own)

    def fetch(self, fetch: Fetch, selection: Selection, slots: Tensor) -> Selected:
        """The selected rows, of the base and of the tail, each in the slot of its place in the selection."""
        indices, first = selection.indices, self._first
        if self.tail is None:
            return _fetch(fetch, selection, self.base.store, slots)
        is_own = indices >= first
        found = _fetch(fetch, replace(selection, indices=indices.masked_fill(is_own, -1)), self.base.store, slots)
        own = torch.empty_like(slots)
        in_tail = Selection((indices - first).masked_fill(~is_own, -1), None, None, None)
        is_found = fetch(in_tail, self.tail, own).valid
        slots.copy_(torch.where(is_found[..., None, None], own, slots))
        return replace(found, valid=found.valid | is_found)

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        shared = self.shared[row]
        if stop <= shared:
            return self.base.store.read(row, start, stop)
        assert self.tail is not None
        own = self.tail.read(row, max(0, start - shared), stop - shared)
        if start >= shared:
            return own
        keys, values = self.base.store.read(row, start, shared)
        return torch.cat((keys, own[0]), dim=1), torch.cat((values, own[1]), dim=1)

    def crop(self, row: int, tokens: int) -> None:
        shared = min(self.shared[row], tokens)
        if self.tail is not None:
            self.tail.crop(row, tokens - shared)
        if shared < self.shared[row]:
            self.shared[row] = shared
            self._first[row] = shared

    @property
    def keeps_rows(self) -> bool:
        return self.base.store.keeps_rows

    @property
    def host_bytes(self) -> int:
        return sum(store.host_bytes for store in self._counted)

    @property
    def device_bytes(self) -> int:
        return sum(store.device_bytes for store in self._counted)

    @property
    def _counted(self) -> list[Store]:
        counted = [] if self.tail is None else [self.tail]
        return [*counted, self.base.store] if self.base.is_counted_by(self) else counted


def share(store: Store, info: LayerInfo, allocate: AllocateStore) -> tuple[ForkedStore, ForkedStore]:
    """The store for the one that has it, and for another request that goes on from the same rows."""
    if isinstance(store, ForkedStore) and store.tail is None:
        return store, ForkedStore(store.base, store.shared, info, allocate)
    base, lengths = Base(store), list(store.length)
    return ForkedStore(base, lengths, info, allocate), ForkedStore(base, lengths, info, allocate)


def refuse_fork(pipeline: LayerPipeline, store: Store | None) -> None:
    """Raise BindingError where a layer's store cannot be the base of others."""
    if store is not None and not (store.can_fork and not store.state()):
        raise BindingError(
            f"layer {pipeline.index}: the store of retriever {pipeline.names.get('allocate_store')!r} "
            f"({type(store).__name__}) cannot be forked: a store can where its fetch writes every row into the slot of "
            f"its place in the selection, and where it holds rows only (can_fork); turn off uva's reuse and sort, or "
            f"choose the store resident, uva or host"
        )


def forked(pipeline: LayerPipeline) -> LayerPipeline:
    """The layer's stages, with a `fetch` and an `update` that know forked stores as well."""
    fetch, update = pipeline.fetch, pipeline.update
    if fetch is None or update is None or isinstance(fetch, _Knowing):
        return pipeline
    return replace(pipeline, fetch=_Knowing(_fetch, fetch), update=_Knowing(_update, update))


class _Knowing(partial[Any]):
    """A stage that knows forked stores, around the retriever's own."""


def _fetch(own: Fetch, selection: Selection, store: Store, slots: Tensor) -> Selected:
    return store.fetch(own, selection, slots) if isinstance(store, ForkedStore) else own(selection, store, slots)


def _update(own: Update, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
    if isinstance(store, ForkedStore):
        store.append(own, keys, values, rows)
    else:
        own(keys, values, store, rows)
