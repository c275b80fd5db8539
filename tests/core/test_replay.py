"""Layers stepped over a dense pass that is made up: what is observed is what happens, and a tape changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pariskv.binding import bind
from pariskv.cache import RequestState
from pariskv.config import Config, parse_config
from pariskv.decode import attend_layer
from pariskv.errors import PluginContractError
from pariskv.registry import Registry
from pariskv.replay import (
    LayerTrace,
    Tape,
    filled_layer,
    fitting_top_k,
    observe,
    replay_layer,
)
from pariskv.types import LayerInfo, Selection

PROMPT, STEPS, U, K = 90, 20, 8, 6  # generated tokens enter the zone
INFO = LayerInfo(0, 1, 2, 3, 16, torch.float32, torch.device("cpu"), 0.25)


def config(retriever: str, **options: Any) -> Config:
    return parse_config(
        {
            "retrievers": {"own": {"type": retriever, **options}},
            "layers": {"default": {"retriever": "own", "top_k": K, "candidates": 0.5}},
            "window": {"sink": 4, "local": 8, "update_interval": U, "dense_below": 0},
        }
    )


def state_of(retriever: str, **options: Any) -> RequestState:
    wanted = config(retriever, **options)
    return RequestState(bind(wanted, 1, Registry.load(entry_points=False)), wanted.window)


@pytest.fixture(scope="module")
def trace() -> LayerTrace:
    random = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, INFO.kv_heads, PROMPT + STEPS, INFO.head_dim, generator=random)
    heads = 2 * torch.randn(STEPS, 1, INFO.kv_heads, INFO.group, INFO.head_dim, generator=random)
    queries = torch.randn(1, INFO.kv_heads * INFO.group, PROMPT, INFO.head_dim, generator=random)
    return LayerTrace(PROMPT, keys, values, heads, queries)


def test_the_oracle_has_a_ratio_of_one_at_every_step_and_the_state_is_empty_again(trace: LayerTrace) -> None:
    state = state_of("exact")
    found = list(replay_layer(trace, state, INFO, K, first=3))
    assert [step for step, _ in found] == list(range(3, STEPS))
    for step, values in found:
        # Scores are float32 on both sides, summed in another order.
        torch.testing.assert_close(values["mass_ratio"], torch.ones(1, 2, dtype=torch.float64), rtol=0, atol=1e-6)
        assert values["fetched"].tolist() == [[K, K]]
        assert values["attended"].tolist() == [[PROMPT + step + 1 - (PROMPT + step - 12) // U * U + K] * 2]
    assert state.layers == {}
    assert len(list(replay_layer(trace, state, INFO, K, first=STEPS - 1))) == 1


def test_heads_that_are_normalised_over_the_zone_alone_are_no_oracle(trace: LayerTrace) -> None:
    state = state_of("exact")
    state.pipelines[0] = replace(state.pipelines[0], reads_steady=frozenset())
    ratios = [values["mass_ratio"] for _, values in replay_layer(trace, state, INFO, K)]
    assert 0.9 < float(torch.stack(ratios).mean()) < 1 - 1e-4


def test_observing_a_step_gives_its_output_and_leaves_the_layer_as_it_was(trace: LayerTrace) -> None:
    layer = filled_layer(trace, state_of("pariskv"), INFO)
    pipeline = layer.pipeline
    seen = observe(layer, trace.heads[0])
    assert layer.pipeline is pipeline
    out, _ = attend_layer(layer, trace.heads[0])
    assert torch.equal(seen.out, out)
    assert seen.candidates is not None
    assert seen.selection is not None
    assert seen.candidates.shape == (1, 2, layer.budget.width)
    assert seen.selection.indices.shape == (1, 2, K)
    proposed = set(seen.candidates[0, 0].tolist())
    assert set(seen.selection.indices[0, 0].tolist()) <= proposed
    layer.pipeline = replace(pipeline, rerank=lambda *_: Selection(torch.full((1, 2, K), 90, dtype=torch.int32)))
    with pytest.raises(PluginContractError, match="the selection of layer 0 has the position 90"):
        observe(layer, trace.heads[0])
    layer.pipeline = replace(pipeline, attend=lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]
    broken = layer.pipeline
    with pytest.raises(ZeroDivisionError):
        observe(layer, trace.heads[0])
    assert layer.pipeline is broken


@pytest.mark.parametrize("name", ["pariskv", "pqcache", "snapkv"])
def test_a_tape_gives_the_second_request_what_the_first_one_learnt(trace: LayerTrace, name: str) -> None:
    plain = list(replay_layer(trace, state_of(name), INFO, K))
    tape, first, second = Tape(), state_of(name), state_of(name)
    tape.record(first)
    filled_layer(trace, first, INFO)
    tape.is_recording = False
    kept = {key: len(values) for key, values in tape.kept.items()}
    first.reset()
    list(replay_layer(trace, first, INFO, K))  # what its steps encode is not kept
    assert {key: len(values) for key, values in tape.kept.items()} == kept
    if name != "snapkv":
        assert (0, "own encode") in kept
    if name != "pariskv":
        assert kept[0, "own fit"] == 1
    tape.play(second)
    for (step, wanted), (_, got) in zip(plain, replay_layer(trace, second, INFO, K), strict=True):
        for key, value in wanted.items():
            assert torch.equal(got[key], value), (step, key)


def test_a_tape_is_played_instead_of_working(trace: LayerTrace) -> None:
    tape, first, second = Tape(), state_of("pariskv"), state_of("pariskv")
    tape.record(first)
    filled_layer(trace, first, INFO)
    (encoder,) = second.pipelines[0].encoders
    second.pipelines[0] = replace(
        second.pipelines[0],
        encoders=(replace(encoder, encode=lambda *_: 1 / 0),),  # type: ignore[arg-type, return-value]
    )
    tape.play(second)
    steps = replay_layer(trace, second, INFO, K)
    # 90 tokens fill blocks of 8 up to the 84th, with the 12 that stay: the next block is full at 92.
    assert next(steps)[0] == 0
    with pytest.raises(ZeroDivisionError):
        list(steps)


@pytest.mark.parametrize("rows", [3, 6, 10])
def test_a_fitting_top_k_is_the_largest_whose_union_has_so_many_rows(trace: LayerTrace, rows: int) -> None:
    def fetched(top_k: int) -> float:
        state = state_of("exact", combine="per_query_head")
        state.pipelines[0] = replace(state.pipelines[0], top_k=top_k)
        layer = filled_layer(trace, state, INFO)
        seen = [observe(layer, heads).selection for heads in trace.heads[:8]]
        return sum(float((one.indices >= 0).sum(-1).float().mean()) for one in seen if one is not None) / len(seen)

    state = state_of("exact", combine="per_query_head")
    state.pipelines[0] = replace(state.pipelines[0], top_k=rows)
    found = fitting_top_k([(filled_layer(trace, state, INFO), trace)], rows)
    assert rows // 3 <= found < rows
    assert fetched(found) <= rows < fetched(found + 1)
