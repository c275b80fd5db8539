"""Pipelines of plain functions: what they call, what they say about themselves, wrappers and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from fakes import (
    HEADS,
    INFO,
    Coarse,
    Format,
    Full,
    Memory,
    Rerank,
    budget,
    codes,
    pipelines,
    query,
    refusal,
)

from pariskv.errors import BindingError, ConfigError, PluginContractError
from pariskv.hookspecs import hookimpl
from pariskv.types import Budget, LayerInfo, Selection, Store


def test_the_functions_of_a_pipeline_are_those_of_the_retrievers() -> None:
    layer = pipelines()[0]
    assert layer.coarse_select is not None
    assert layer.rerank is not None
    assert layer.update is not None
    selection = layer.coarse_select(query(), codes(), budget(5))
    assert selection.indices.tolist() == [[[7] * 5]]
    assert layer.rerank(query(), selection, codes(), 2).indices.tolist() == [[[7, 7]]]
    assert layer.update(HEADS, HEADS, None, [0]) is None  # type: ignore[arg-type]
    assert layer.encoders[0].encode(HEADS, HEADS, {})["owner"] is HEADS
    assert layer.encoders[0].encode_query is not None
    assert layer.encoders[0].fit is None


def test_per_query_head_selection_widens_the_slots() -> None:
    heads = {"heads": type("Heads", (Rerank,), {"selects_per_query_head": True})}
    coarse = {"heads": type("Heads", (Full,), {"selects_per_query_head": True})}
    assert pipelines("{default: {rerank: heads}}", retrievers=heads)[0].slots(3) == 3 * 512
    assert pipelines("{default: {coarse_select: heads}}", retrievers=coarse)[0].slots(3) == 512
    assert pipelines("{default: {coarse_select: heads, rerank: none}}", retrievers=coarse)[0].slots(3) == 3 * 512


def test_indexes_is_the_strictest_of_the_retrievers_used() -> None:
    prompt = {"prompt": type("Prompt", (Coarse,), {"indexes": "prompt"})}
    layers = pipelines("{1: {coarse_select: prompt}}", retrievers=prompt)
    assert (layers[0].indexes, layers[1].indexes) == ("all", "prompt")


def test_graph_safe_needs_every_stage_of_the_step_and_gives_its_reason() -> None:
    slow = {"slow": type("Slow", (Rerank,), {"graph_safe": False})}
    layers = pipelines("{1: {rerank: slow}}", retrievers=slow)
    assert (layers[0].graph_safe, layers[0].graph_reason) == (True, "")
    assert not layers[1].graph_safe
    assert layers[1].graph_reason.startswith("rerank of retriever 'slow' (type slow from distribution pariskv ")
    assert layers[1].graph_reason.endswith(" does not declare graph_safe")


def test_what_runs_between_steps_need_not_be_graph_safe() -> None:
    slow = {"slow": type("Slow", (Format,), {"graph_safe": False})}
    assert pipelines("{default: {codes_from: slow}}", retrievers=slow)[0].graph_safe


def test_the_fit_and_needs_of_a_format_are_passed_on() -> None:
    class Fitted(Full):
        needs = frozenset({"query_moment", "pre_rope"})

        @hookimpl
        def fit(self, layer, prefill):  # type: ignore[no-untyped-def]
            return {"mean": HEADS}

    encoder = pipelines("{default: {retriever: fitted}}", retrievers={"fitted": Fitted})[0].encoders[0]
    assert encoder.needs == {"query_moment", "pre_rope"}
    assert encoder.fit is not None
    assert encoder.fit(INFO, None)["mean"] is HEADS  # type: ignore[arg-type]


def test_what_fails_in_a_stage_says_where() -> None:
    class Failing(Full):
        @hookimpl
        def rerank(self, query, selection, codes, top_k):  # type: ignore[no-untyped-def]
            raise RuntimeError("boom")

    config = "retrievers: {mine: {type: failing}}"
    layer = pipelines("{3: {rerank: mine}}", config, retrievers={"failing": Failing})[3]
    assert layer.rerank is not None
    with pytest.raises(RuntimeError, match=r"^boom") as caught:
        layer.rerank(query(), Selection(HEADS), codes(), 3)
    (note,) = caught.value.__notes__
    assert note.startswith("in rerank of retriever 'mine' (type failing from distribution pariskv ")
    assert note.endswith("), layer 3")
    assert layer.allocate_store is not None
    with pytest.raises(NotImplementedError) as other:
        layer.allocate_store(INFO, 8)
    assert other.value.__notes__[0].startswith("in allocate_store of retriever 'resident'")


class Watcher:
    """Counts coarse_select and update, and passes on what they return."""

    calls: list[str]
    graph_safe = True
    name = "watcher"

    def __init__(self, calls: list[str]):
        self.calls = calls

    @hookimpl(wrapper=True)
    def coarse_select(self, budget: Budget):  # type: ignore[no-untyped-def]
        self.calls.append(f"{self.name} {budget.width}")
        return (yield)

    @hookimpl(wrapper=True)
    def update(self, rows: list[int]):  # type: ignore[no-untyped-def]
        self.calls.append(f"{self.name} rows {rows}")
        return (yield)


def test_a_wrapper_sees_the_calls_of_every_retriever_and_only_theirs() -> None:
    calls: list[str] = []

    class Eleven(Coarse):
        @hookimpl(specname="coarse_select")
        def choose(self, query, codes, budget):  # type: ignore[no-untyped-def]
            return Selection(torch.full((1, 1, budget.width), 11))

        coarse_select = None  # type: ignore[assignment]

    layers = pipelines(
        "{1: {coarse_select: eleven}}",
        "wrappers: [watcher]",
        retrievers={"eleven": Eleven},
        wrappers={"watcher": lambda: Watcher(calls)},
    )
    for index, position in ((0, 7), (1, 11)):
        coarse_select, update = layers[index].coarse_select, layers[index].update
        assert coarse_select is not None
        assert update is not None
        assert coarse_select(query(), codes(), budget(2)).indices.tolist() == [[[position] * 2]]
        update(HEADS, HEADS, None, [index])  # type: ignore[arg-type]
    assert calls == ["watcher 2", "watcher rows [0]", "watcher 2", "watcher rows [1]"]
    assert layers[0].graph_safe


def test_wrappers_nest_as_they_are_listed() -> None:
    calls: list[str] = []
    inner = type("Inner", (Watcher,), {"name": "inner"})
    wrappers: dict[str, Callable[[], object]] = {"inner": lambda: inner(calls), "outer": lambda: Watcher(calls)}
    layer = pipelines("{}", "wrappers: [outer, inner]", wrappers=wrappers)[0]
    assert layer.coarse_select is not None
    layer.coarse_select(query(), codes(), budget(1))
    assert calls == ["watcher 1", "inner 1"]


def test_equal_retrievers_are_still_two_plugins() -> None:
    @dataclass
    class Equal(Coarse):
        position: int = 0

        @hookimpl
        def coarse_select(self, query, codes, budget):  # type: ignore[no-untyped-def]
            return self

    layers = pipelines(
        "{0: {coarse_select: a}, 1: {coarse_select: b}}",
        "wrappers: [watcher]\nretrievers: {a: {type: equal}, b: {type: equal}}",
        retrievers={"equal": Equal},
        wrappers={"watcher": lambda: Watcher([])},
    )
    got = [layers[index].coarse_select(query(), codes(), budget()) for index in (0, 1)]  # type: ignore[misc]
    assert got[0] == got[1]
    assert got[0] is not got[1]


def test_a_failure_inside_a_wrapper_names_the_wrapper_too() -> None:
    class Failing(Full):
        @hookimpl
        def coarse_select(self, query, codes, budget):  # type: ignore[no-untyped-def]
            raise RuntimeError("boom")

    wrappers = {"watcher": lambda: Watcher([])}
    config = "wrappers: [watcher]"
    layer = pipelines("{default: {coarse_select: f}}", config, retrievers={"f": Failing}, wrappers=wrappers)[0]
    assert layer.coarse_select is not None
    with pytest.raises(RuntimeError, match="boom") as caught:
        layer.coarse_select(query(), codes(), budget())
    assert caught.value.__notes__[0].endswith("layer 0, inside 'watcher'")


def test_a_wrapper_that_is_not_graph_safe_turns_the_graph_off() -> None:
    loud = type("Loud", (Watcher,), {"graph_safe": False})
    layers = pipelines("{0: {retriever: dense}}", "wrappers: [loud]", wrappers={"loud": lambda: loud([])})
    assert layers[0].graph_safe
    assert layers[1].graph_reason == "wrapper 'loud' around coarse_select does not declare graph_safe"


class Plain:
    @hookimpl
    def encode(self, keys):  # type: ignore[no-untyped-def]
        return {}


class Misnamed:
    @hookimpl(wrapper=True)
    def encode(self, key):  # type: ignore[no-untyped-def]
        return (yield)


class Unknown:
    @hookimpl(wrapper=True)
    def encod(self):  # type: ignore[no-untyped-def]
        return (yield)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (Plain, "wrapper 'w': encode must be marked @hookimpl(wrapper=True)"),
        (Misnamed, "wrapper 'w': Plugin 'wrapper w' for hook 'encode'"),
        (Unknown, "wrapper 'w': encod is marked @hookimpl, but 'encod' is no stage (did you mean 'encode'?)"),
    ],
)
def test_a_wrapper_that_breaks_the_contract_is_refused(wrapper: type, message: str) -> None:
    assert refusal(PluginContractError, "{}", "wrappers: [w]", wrappers={"w": wrapper}).startswith(message)


def test_a_wrapper_is_listed_once_and_exists() -> None:
    wrappers = {"watcher": lambda: Watcher([])}
    message = refusal(BindingError, "{}", "wrappers: [watcher, watcher]", wrappers=wrappers)
    assert message == "wrappers: 'watcher' is listed twice; list it once"
    message = refusal(ConfigError, "{}", "wrappers: [watch]", wrappers=wrappers)
    assert message == "wrappers: unknown wrapper 'watch' (did you mean 'watcher'?); known: watcher"


def test_a_store_that_raises_while_allocating_is_not_swallowed() -> None:
    class Store2(Memory):
        @hookimpl
        def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
            raise MemoryError("no room")

    layer = pipelines("{}", "store: s", retrievers={"s": Store2})[0]
    assert layer.allocate_store is not None
    with pytest.raises(MemoryError, match="no room"):
        layer.allocate_store(INFO, 8)
