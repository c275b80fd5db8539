"""A stage that declares graph_safe asks the host nothing, so that a CUDA graph can hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pariskv_plugins.exact import COMBINE, Exact, Options
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.resident import Resident
from torch import Tensor

from pariskv.attention import TorchAttend
from pariskv.errors import PluginContractError
from pariskv.hookspecs import Retriever, hookimpl
from pariskv.testing import check_retriever
from pariskv.testing.graphs import AsksHost, no_host
from pariskv.types import Budget, Codes, LayerInfo, Query, Selected, Selection, Store, Tensors, WorkingSet


@pytest.mark.parametrize(
    "make", [ParisPaper, *(lambda name=name: Exact(Options(name)) for name in (*COMBINE, "per_query_head"))]
)
def test_a_step_never_asks_the_host(make: Callable[[], Any]) -> None:
    retriever, resident = make(), Resident()
    assert retriever.graph_safe
    layer = LayerInfo(0, 2, 3, 2, 64, torch.float32, torch.device("cpu"), 0.125)
    keys = torch.randn(2, 3, 100, 64, generator=torch.Generator().manual_seed(0))
    heads = keys[:, :, :2].contiguous()
    codes, store = retriever.allocate_codes(layer, 128), resident.allocate_store(layer, 128)
    codes.append([0, 1], [0, 0], retriever.encode(keys, keys, {}), 100)
    codes.length.fill_(100)
    resident.update(keys, keys, store, [0, 1])
    budget = Budget(50, torch.tensor([50, 20], dtype=torch.int32))
    slots = torch.zeros(2, 3, 2 * 10, 2, 64)

    def step() -> Tensor:
        encoded = retriever.encode_query(heads, {}) if hasattr(retriever, "encode_query") else None
        query = Query(heads, encoded, 0.125, 30.0)
        selection = retriever.rerank(query, retriever.coarse_select(query, codes, budget), codes, 10)
        return resident.fetch(selection, store, slots[:, :, : selection.indices.shape[2]]).valid

    warmed_up = step()
    with no_host():
        again = step()
    assert torch.equal(again, warmed_up)


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        (lambda mask: mask.nonzero(), r"nonzero\(\)"),
        (lambda mask: bool(mask.any()), r"a number read by item\(\), int\(\) or if"),
        (lambda mask: torch.ones(2)[mask], "an index by a mask"),
        (lambda mask: mask.tolist(), r"tolist\(\)"),
    ],
)
def test_the_guard_itself_finds_what_asks_the_host(asks: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(AsksHost, match=message), no_host():
        asks(torch.tensor([True, False]))


# `check_retriever` refuses each stage of a step that declares what it does not keep.


class Careless(Exact):
    """Declares graph_safe, and asks the host in one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def ask(self, stage: str, tensor: Tensor) -> None:
        if stage == self.stage:
            int(tensor.sum())

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        self.ask("encode_query", heads)
        return {"heads": heads}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        self.ask("coarse_select", budget.count)
        return super().coarse_select(query, codes, budget)

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        self.ask("rerank", codes.length)
        return super().rerank(query, selection, codes, top_k)


class CarelessStore(Resident):
    graph_safe = True

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        if selection.indices.max() < 0:
            raise ValueError("nothing to fetch")
        return super().fetch(selection, store, slots)


class CarelessAttention(TorchAttend):
    graph_safe = True

    @hookimpl
    def attend(self, query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
        assert bool(working.steady.any())
        return super().attend(query, working, selected)


class CarelessAppend(TorchAttend):
    graph_safe = True

    @hookimpl
    def append(self, keys: Tensor, values: Tensor, working: WorkingSet) -> None:
        ring = working.steady.shape[1] - working.sink
        for row, (length, is_active) in enumerate(zip(working.length.tolist(), working.active.tolist(), strict=True)):
            slot = length if length < working.sink else working.sink + (length - working.sink) % ring
            working.rows[row, :, slot] = torch.stack((keys, values), dim=3)[row, :, 0]
            if is_active:
                working.steady[row, slot] = True
                working.length[row] += 1


@pytest.mark.parametrize("stage", ["encode_query", "coarse_select", "rerank"])
def test_a_stage_that_asks_the_host_must_not_declare_graph_safe(stage: str) -> None:
    check_retriever(Careless("none"), lengths=(90, 16, 0))
    with pytest.raises(PluginContractError, match=f"Careless.{stage}: declares graph_safe, but a number read by item"):
        check_retriever(Careless(stage), lengths=(90, 16, 0))


def test_so_must_no_store_and_no_attention() -> None:
    refused: tuple[tuple[Retriever, str], ...] = (
        (CarelessStore(), "CarelessStore.fetch: declares graph_safe, but a number read"),
        (CarelessAttention(), "CarelessAttention.attend: declares graph_safe, but a number read"),
        (CarelessAppend(), r"CarelessAppend.append: declares graph_safe, but tolist\(\)"),
    )
    for retriever, message in refused:
        with pytest.raises(PluginContractError, match=message):
            check_retriever(retriever, lengths=(90, 16, 0))


def test_what_does_not_declare_it_may_ask() -> None:
    careless = Careless("coarse_select")
    careless.graph_safe = False
    check_retriever(careless, lengths=(90, 16, 0))
