"""`debug.trace_hooks`: what is printed of a run, and that nothing else changes but the graph."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from fakes import budget, codes, pipelines, query

from pariskv.config import RuntimeConfig
from pariskv.errors import ConfigError
from pariskv.graph import capture_reason, log_fallback
from pariskv.hookspecs import hookimpl
from pariskv.testing import TinyRuns
from pariskv.tracing import shapes
from pariskv.types import Budget, CodeField, Codes, LayerInfo, Query, Selection


class Watcher:
    """Counts the calls of coarse_select."""

    def __init__(self, calls: list[int]):
        self.calls = calls

    @hookimpl(wrapper=True)
    def coarse_select(self, budget: Budget):  # type: ignore[no-untyped-def]
        self.calls.append(budget.width)
        return (yield)


LINE = re.compile(r"layer +(\d+)  (\w+) +([\w-]+) +(\d+\.\d{3}) ms  (.*) -> (.*)")
TRACED = "debug: {trace_hooks: true}"


def test_every_hook_call_of_a_request_is_a_line(tiny_runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {"default": {"retriever": "pariskv", "top_k": 8, "candidates": 16}}
    plain = tiny_runs.compare(layers)
    assert capsys.readouterr().err == ""
    traced = tiny_runs.compare(layers, debug={"trace_hooks": True})
    lines = capsys.readouterr().err.splitlines()
    assert traced == plain
    found = [match for line in lines if (match := LINE.fullmatch(line))]
    assert len(found) == len([line for line in lines if line])
    steps = tiny_runs.new_tokens - 1  # the first token comes from the prompt
    for stage in ("encode_query", "coarse_select", "rerank", "fetch"):
        assert [match[2] for match in found].count(stage) == 3 * steps  # layers
    assert {match[2] for match in found} >= {"allocate_codes", "allocate_store", "fit", "encode", "update", "attend"}
    assert {match[3] for match in found if match[2] == "fetch"} == {"resident"}
    select = next(match for match in found if match[2] == "coarse_select")
    assert "query {heads f64[2,2,3,16], encoded {" in select[5]
    assert "budget {width " in select[5]
    assert re.fullmatch(r"\{indices i32\[2,2,\d+\]\}", select[6])


def test_the_layers_beginning_anew_leaves_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    layers = pipelines("{}", TRACED, layer_count=2)
    for index in (0, 1, 0):
        coarse_select = layers[index].coarse_select
        assert coarse_select is not None
        coarse_select(query(), codes(), budget(2))
    first = [line[:8] for line in capsys.readouterr().err.splitlines()]
    assert first == ["layer  0", "layer  1", "", "layer  0"]


def test_rehearsals_and_warm_ups_are_watched_by_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    layer = pipelines("{}", f"{TRACED}\nwrappers: [watcher]", wrappers={"watcher": lambda: Watcher(calls)})[0]
    for one, lines in ((layer.plain, 0), (layer, 1)):
        assert one.coarse_select is not None
        one.coarse_select(query(), codes(), budget(1))
        assert (len(calls), len(capsys.readouterr().err.splitlines())) == (lines, lines)
    assert pipelines("{}")[0].plain.unwatched is None


def test_a_traced_step_is_not_captured_and_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Cache:
        def graph_reason(self) -> str:
            return pipelines("{}", TRACED)[0].graph_reason

    device = torch.device("cuda")
    reason = capture_reason(RuntimeConfig(), Cache(), device)
    with caplog.at_level(logging.WARNING, "pariskv"):
        log_fallback(RuntimeConfig(), reason, device)
    assert caplog.messages == ["decode steps run eagerly: debug.trace_hooks prints every hook call"]
    with pytest.raises(ConfigError, match=r"runtime\.graph=on: debug\.trace_hooks prints every hook call; use auto"):
        capture_reason(RuntimeConfig(graph="on"), Cache(), device)
    assert pipelines("{}")[0].graph_reason == ""


def test_arguments_in_a_few_words() -> None:
    info = LayerInfo(0, 2, 3, 4, 8, torch.bfloat16, torch.device("cpu"), 0.5)
    made = Codes.empty(info, 20, levels=CodeField((-1, 8), torch.int8))
    assert shapes(info) == "B=2 H=3 G=4 D=8 bf16"
    assert shapes(made) == "{length [0, 0], levels i8[2,3,20,8]}"
    assert shapes(Query(torch.zeros(2, 3, 4, 8), None, 0.5)) == "{heads f32[2,3,4,8]}"
    assert shapes(Budget(5, torch.zeros(2, dtype=torch.int32))) == "{width 5, count i32[2]}"
    assert shapes((Selection(torch.zeros(2, 3, 5, dtype=torch.int32)), None)) == "({indices i32[2,3,5]}, None)"
    assert shapes({"centre": torch.zeros(2, dtype=torch.uint8)}) == "{centre u8[2]}"
    assert shapes([0, 1]) == "[0, 1]"
