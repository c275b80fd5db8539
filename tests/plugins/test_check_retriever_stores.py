"""`check_retriever` finds what is wrong with a store or an attention, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_plugins.resident import Resident, own
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.hookspecs import Retriever, hookimpl
from pariskv.testing import check_retriever
from pariskv.types import LayerInfo, Query, Selected, Selection, Store, WorkingSet


def refused(retriever: object, message: str) -> None:
    with pytest.raises(PluginContractError, match=message):
        check_retriever(retriever, lengths=(90, 16, 0))


class Broken(Resident):
    """Leaves the working of `stage` to `change`."""

    def __init__(self, stage: str, change: Callable[..., Any]) -> None:
        self.stage = stage
        self.change: Callable[..., Any] = change

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        store = super().allocate_store(layer, capacity)
        return self.change(store) or store if self.stage == "allocate_store" else store

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        selected = super().fetch(selection, store, slots)
        return self.change(selected, store, slots) if self.stage == "fetch" else selected

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        if self.stage == "update":
            self.change(keys, values, own(store), rows)
        else:
            super().update(keys, values, store, rows)


def swapped(selected: Selected, store: Store, slots: Tensor) -> Selected:
    slots.copy_(slots.flip(2))
    return replace(selected, valid=selected.valid.flip(2))


def in_another_order(selected: Selected, store: Store, slots: Tensor) -> Selected:
    assert selected.bias is not None
    return replace(swapped(selected, store, slots), bias=selected.bias.flip(-1))


def no_capacity(keys: Tensor, values: Tensor, store: Any, rows: list[int]) -> None:
    if all(store.length[row] + keys.shape[2] <= store.capacity for row in rows):
        store.append(keys, values, rows)


BROKEN_STORE: dict[str, tuple[str, Callable[..., Any], str]] = {
    "no count": (
        "update",
        lambda k, v, s, r: None,
        r"Broken.update: store.length is \[0, 0, 0\], wanted \[90, 16, 0\]",
    ),
    "values for keys": ("update", lambda k, v, s, r: s.append(v, k, r), r"store.read\(0, 22, 90\) gives other keys"),
    "a full store that says nothing": (
        "update",
        no_capacity,
        "took 1 tokens more than the store has room for; raise CapacityError",
    ),
    "another error when full": (
        "update",
        lambda k, v, s, r: s.append(k, v, r) if k.any() else 1 / 0,
        "a full store raised ZeroDivisionError",
    ),
    "no store": ("allocate_store", lambda s: object(), "return a pariskv.types.Store"),
    "all slots valid": (
        "fetch",
        lambda s, st, sl: replace(s, valid=s.valid | True),
        "64 slots are valid, wanted 32; -1 is no token",
    ),
    "another order": ("fetch", in_another_order, "other slots than those of their places in the selection; can_fork"),
    "no bias": ("fetch", lambda s, st, sl: replace(s, bias=None), "drops the selection's bias"),
    "no extra": ("fetch", lambda s, st, sl: replace(s, extra=None), "drops the selection's extra or partial"),
    "zeroed slots": ("fetch", lambda s, st, sl: (sl.zero_(), s)[1], "do not hold the selected tokens' rows, each once"),
    "slots in another order than the bias": ("fetch", swapped, "bias is not in the slots' order; permute it with them"),
    "rows of the neighbours": (
        "fetch",
        lambda s, st, sl: (sl._base.zero_(), s)[1],
        "writes to rows in front of its slots",
    ),
    "valid of another dtype": (
        "fetch",
        lambda s, st, sl: replace(s, valid=s.valid.int()),
        r"valid is .* wanted bool \[B, H, K\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN_STORE)
def test_a_broken_store_is_found(name: str) -> None:
    stage, change, message = BROKEN_STORE[name]
    refused(Broken(stage, change), message)


def test_a_store_without_update_is_found() -> None:
    class Half(Retriever):
        @hookimpl
        def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
            return Resident().allocate_store(layer, capacity)

    refused(Half(), "Half.update: is missing")


class Attends(Retriever):
    """The definition; `masked` says whether unused rows are kept out as they should."""

    def __init__(self, masked: bool = True) -> None:
        self.masked = masked

    @hookimpl
    def attend(self, query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
        assert selected is not None
        assert selected.bias is not None
        heads, slots = selected.valid.shape[1:]
        used = torch.cat((working.steady.unsqueeze(1).expand(-1, heads, -1), selected.valid), dim=-1)
        rows = working.rows
        if self.masked:
            rows = torch.where(used[..., None, None], rows, 0)
        keys, values = rows.float().unbind(3)
        scores = query.heads.float() @ keys.mT * query.scaling
        scores[..., -slots:] += selected.bias
        scores = torch.where(used.unsqueeze(2), scores, -torch.inf)
        return scores.softmax(-1) @ values, scores.logsumexp(-1)


def test_attend_is_checked_against_one_softmax() -> None:
    check_retriever(Attends())
    check_retriever(Attends(), dtype=torch.bfloat16)
    refused(Attends(masked=False), "Attends.attend: out is not the softmax over sink, ring and selected rows")
