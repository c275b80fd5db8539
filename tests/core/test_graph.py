"""When a step is captured, replayed, or run eagerly: the order of calls, with a graph that only notes them."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pariskv.config import GenerationConfig, RuntimeConfig
from pariskv.errors import ConfigError
from pariskv.graph import CapturedSteps, capture_reason, log_fallback
from pariskv.sampling import Sampler

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Notes:
    """A cache, a model and CUDA graphs that write down what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.now: object = "a"
        notes = self

        class Graph:
            def replay(self) -> None:
                notes.calls.append("replay")

        @contextmanager
        def capture(graph: Graph) -> Any:
            notes.calls.append("capture")
            yield

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.calls.append("forward")
        return torch.nn.functional.one_hot(tokens[:, 0] + 1, 9).float()

    def graph_reason(self) -> str:
        return "layer 0: a stage does not declare graph_safe"

    def shape(self) -> object:
        return self.now

    def count_step(self) -> None:
        self.calls.append("count")

    def end_step(self) -> None:
        self.calls.append("end")

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_a_change_of_shape_is_one_eager_step_then_a_capture_then_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    token = torch.zeros(1, 1, dtype=torch.int64)
    steps = CapturedSteps(notes.forward, notes, token, Sampler(GenerationConfig(), 1))
    eager = ["forward", "end"]
    captured = ["capture", "forward", "replay", "end"]
    replayed = ["replay", "count", "end"]
    for shape, wanted in (("a", eager), ("a", captured), ("a", replayed), ("b", eager), ("b", captured)):
        notes.now = shape
        steps.step(token)
        assert notes.taken() == wanted
    assert steps.captures == 2


def test_the_first_step_gives_the_next_tokens_and_moves_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    steps = CapturedSteps(notes.forward, notes, torch.tensor([[7], [3]]), Sampler(GenerationConfig(), 2))
    assert steps.step(torch.tensor([[4], [2]])).tolist() == [5, 3]
    assert steps.positions.tolist() == [[8], [4]]


@pytest.mark.parametrize(
    ("runtime", "cache", "device", "reason"),
    [
        (RuntimeConfig(), object(), CPU, "the model is on the cpu"),
        (RuntimeConfig(), object(), CUDA, "a object grows by concatenation"),
        (RuntimeConfig(graph="off"), None, CUDA, "runtime.graph is off"),
    ],
)
def test_reasons_to_run_eagerly(runtime: RuntimeConfig, cache: Any, device: torch.device, reason: str) -> None:
    assert capture_reason(runtime, cache, device).startswith(reason)


def test_what_was_asked_for_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^runtime\.graph=on: layer 0: a stage does not declare graph_safe"):
        capture_reason(RuntimeConfig(graph="on"), Notes(monkeypatch), CUDA)
    with pytest.raises(ConfigError, match=r"^runtime\.compile=true .*: layer 0"):
        capture_reason(RuntimeConfig(compile=True), Notes(monkeypatch), CUDA)


def test_a_fallback_on_a_gpu_is_said_aloud_and_a_cpu_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pariskv"):
        log_fallback(RuntimeConfig(), "so", CUDA)
        log_fallback(RuntimeConfig(), "so", CPU)
        log_fallback(RuntimeConfig(graph="off"), "so", CUDA)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
