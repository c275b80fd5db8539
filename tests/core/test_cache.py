"""The state of a request over several layers: when each of them moves what is due."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pariskv.binding import bind
from pariskv.cache import LAYERS_PER_STEP, RequestState, window_of
from pariskv.config import WindowConfig, parse_config
from pariskv.registry import Registry
from pariskv.types import LayerInfo

INFO = LayerInfo(0, 2, 1, 2, 8, torch.float32, torch.device("cpu"), 0.25)
LAYERS, U, PROMPT = 7, 8, 40


@pytest.fixture
def state() -> RequestState:
    config = parse_config(
        {
            "layers": {"default": {"retriever": "exact", "top_k": 4}},
            "window": {"sink": 2, "local": 8, "update_interval": U, "dense_below": 0},
        }
    )
    return RequestState(bind(config, LAYERS, Registry.load(entry_points=False)), config.window)


def step(state: RequestState, tokens: int) -> None:
    for index in range(LAYERS):
        token = torch.randn(2, 1, tokens, 8)
        layer = state.layer(replace(INFO, index=index))
        layer.append(token, token)
        if tokens > 1:
            layer.chunk_attended(torch.randn(2, 2, tokens, 8), None)


def test_layers_take_turns_with_their_updates(state: RequestState) -> None:
    state.begin_prefill(PROMPT, 100)
    step(state, PROMPT)
    state.end_prefill()
    moved: list[list[int]] = []
    for _ in range(3 * U):
        before = [list(one.zones) for one in state.layers.values()]
        step(state, 1)
        state.end_step()
        after = [one.zones for one in state.layers.values()]
        moved.append([i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new])
        for layer in state.layers.values():
            assert layer.zones == [layer.window.zone(tokens) for tokens in layer.lengths]
    assert max(map(len, moved)) == LAYERS_PER_STEP
    assert [sum(index in layers for layers in moved) for index in range(LAYERS)] == [3] * LAYERS


def test_a_layer_lags_by_less_than_an_update(state: RequestState) -> None:
    window = WindowConfig(sink=2, local=8, update_interval=4, dense_below=0)
    locals_ = [window_of(state.pipelines[0], window, index).local for index in range(10)]
    assert locals_ == [8, 8, 9, 9, 10, 10, 11, 11, 8, 8]
