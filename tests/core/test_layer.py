"""One layer's state driven with random keys against a plain list of tokens."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_driving import D, Driver, G, H, Learner, Relearner, new_layer, offer, pipeline

from pariskv import LayerInfo, Retriever, hookimpl
from pariskv.binding import bind
from pariskv.config import parse_config
from pariskv.errors import ModelError
from pariskv.prompt import BufferedPrompt
from pariskv.registry import Registry
from pariskv.rehearsal import REHEARSING, Rehearsal
from pariskv.warmup import warm_up
from pariskv.window import Window


@settings(max_examples=25, deadline=None)
@given(
    window=st.builds(
        Window,
        sink=st.integers(0, 5),
        local=st.integers(1, 6),
        update=st.integers(1, 6),
        dense_below=st.integers(0, 30),
    ),
    columns=st.integers(1, 40),
    pads=st.lists(st.integers(0, 39), min_size=1, max_size=3),
    chunk=st.integers(1, 40),
    new_tokens=st.integers(1, 20),
    retriever=st.sampled_from(["exact", "dense", "pariskv"]),
)
def test_a_layer_attends_to_exactly_the_tokens_it_was_given(
    window: Window, columns: int, pads: list[int], chunk: int, new_tokens: int, retriever: str
) -> None:
    """Ragged rows, any chunks, updates, and generation past what was planned (rings, store and codes grow)."""
    layer = new_layer(window, pipeline(retriever), len(pads), new_tokens)
    driver = Driver(layer, [min(pad, columns - 1) for pad in pads])
    driver.prefill(columns, chunk)
    for _ in range(new_tokens + 24):
        out, want = driver.step()
        torch.testing.assert_close(out, want)
    layer.finish_step()
    assert layer.zones == ([0] * len(pads) if retriever == "dense" else [window.zone(n) for n in layer.lengths])


def test_a_row_that_has_ended_writes_and_retrieves_nothing_more() -> None:
    layer = new_layer(Window(2, 3, 4), pipeline(), 2, new_tokens=60)
    driver = Driver(layer, [0, 5])
    driver.prefill(20, 20)
    driver.step()
    layer.finish_step()
    held = layer.lengths[1], layer.zones[1], layer.codes["exact"]["keys"][1].clone(), layer.store.length[1]
    for _ in range(30):
        out, want = driver.step(active=[True, False])
        torch.testing.assert_close(out[0], want[0])
        assert layer.zone.length.tolist()[1] == layer.budget.count.tolist()[1] == 0
        assert not bool(layer.chosen[1].any())
    layer.finish_step()
    assert (layer.lengths[1], layer.zones[1], layer.store.length[1]) == (held[0], held[1], held[3])
    zone = held[1]
    assert torch.equal(layer.codes["exact"]["keys"][1, :, :zone], held[2][:, :zone])
    out, want = driver.step()  # and goes on where it stopped, if it is asked to
    torch.testing.assert_close(out, want)


def test_unused_slots_codes_and_rows_may_hold_anything() -> None:
    layer = new_layer(Window(2, 3, 4), pipeline("pariskv", top_k=50), 2, new_tokens=60)
    driver = Driver(layer, [0, 9])
    driver.prefill(30, 30)
    for _ in range(20):
        device = layer.device
        assert device is not None
        device.working.slots.fill_(math.nan)
        device.rows[:, :, : device.steady.shape[1]].transpose(1, 2)[~device.steady] = math.nan
        for row, zone in enumerate(layer.zones):
            layer.store.rows[row, :, zone:] = math.nan
            layer.codes["pariskv"]["weights"][row, :, zone:] = math.nan
            layer.codes["pariskv"]["signs"][row, :, :, zone:] = 255
        out, want = driver.step()
        torch.testing.assert_close(out, want)


def test_a_later_turn_continues_the_history() -> None:
    layer = new_layer(Window(2, 3, 4), pipeline(), 2)
    driver = Driver(layer, [0, 6])
    driver.prefill(20, 7)
    for _ in range(9):
        driver.step()
    history = layer.columns
    layer.request.prefilling = True
    tokens = driver.random(2, H, 11, 2, D)
    keys, values = layer.append(tokens[..., 0, :], tokens[..., 1, :])
    for row in range(2):
        driver.rows[row] += list(tokens[row].unbind(1))
        whole = torch.stack(driver.rows[row], dim=1)
        pad = history + 11 - whole.shape[1]
        assert torch.equal(keys[row, :, pad:], whole[:, :, 0])
        assert torch.equal(values[row, :, pad:], whole[:, :, 1])
    layer.chunk_attended(driver.random(2, H * G, 11, D), None)
    layer.request.prefilling = False
    layer.end_prefill()
    for _ in range(20):
        out, want = driver.step()
        torch.testing.assert_close(out, want)


def test_a_layer_that_indexes_the_prompt_only_keeps_the_rest_dense() -> None:
    bound = replace(pipeline("exact"), indexes="prompt")
    for columns, new_tokens in ((40, 30), (3, 1)):  # the second request fits into the sink
        layer = new_layer(Window(8, 3, 4), bound, 1, new_tokens)
        driver = Driver(layer, [0])
        driver.prefill(columns, columns)
        for _ in range(new_tokens + 20):
            out, want = driver.step()
            torch.testing.assert_close(out, want)
        assert layer.zones == [Window(8, 3, 4).zone(columns)]


@pytest.mark.parametrize("retriever", ["pariskv", "exact", "dense"])
def test_a_warm_up_runs_every_stage_and_leaves_nothing(retriever: str) -> None:
    called = []
    bound = pipeline(retriever)

    def seen(name: str, stage: Any) -> Any:
        return lambda *arguments: called.append(name) or stage(*arguments)

    stages = ("coarse_select", "rerank", "fetch", "update", "attend")
    wanted = [name for name in stages if getattr(bound, name) is not None]
    bound = replace(bound, **{name: seen(name, getattr(bound, name)) for name in wanted})
    info = LayerInfo(0, 3, H, G, D, torch.float32, torch.device("cpu"), D**-0.5)
    warm_up(info, [bound, bound])
    assert set(called) == set(wanted)


def test_what_fails_before_a_request_says_so_and_names_the_first_layer_of_its_kind() -> None:
    class Failing(Retriever):
        @hookimpl
        def coarse_select(self, query, codes, budget):  # type: ignore[no-untyped-def]
            raise KeyError("missing")

    registry = Registry.load()
    registry.retrievers["failing"] = [replace(registry.retrievers["exact"][0], factory=Failing, options=None)]
    config = parse_config("layers: {default: {retriever: failing}, 0: {retriever: dense}}")
    bound = bind(config, 3, registry)
    info = LayerInfo(0, 4, H, G, D, torch.float32, torch.device("cpu"), D**-0.5)
    rehearsal = Rehearsal(info, bound[1], Window(2, 3, 4))
    for run, when in (
        (lambda: warm_up(info, bound.values()), "while warming up a layer of its kind on random tokens"),
        (lambda: rehearsal.at(zone=8, tokens=16, batch=1), REHEARSING),
    ):
        with pytest.raises(KeyError) as caught:
            run()
        where, noted = caught.value.__notes__
        assert re.fullmatch(r"in coarse_select of retriever 'failing' \(.*\), layer 1", where)
        assert noted == when


def test_padding_anywhere_but_on_the_left_is_refused() -> None:
    layer = new_layer(Window(2, 3, 4), pipeline(), 1)
    driver = Driver(layer, [0])
    layer.request.prefilling = True
    layer.append(driver.random(1, H, 5, D), driver.random(1, H, 5, D))
    mask = torch.tensor([True, True, True, True, False]).view(1, 1, 1, 5)
    with pytest.raises(ModelError, match="padding on the left"):
        layer.chunk_attended(driver.random(1, H * G, 5, D), mask)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_fit_sees_the_prompt_once_and_its_state_is_frozen(chunk: int) -> None:
    made = Learner()
    registry = Registry.load(entry_points=False)
    offer(registry, made)
    config = parse_config({"layers": {"default": {"retriever": "exact", "encode": "learner", "top_k": 9}}})
    layer = new_layer(Window(2, 3, 4), bind(config, 1, registry)[0], 2, new_tokens=30)
    driver = Driver(layer, [0, 33])
    driver.prefill(40, chunk)
    assert [view[0] for view in made.views] == [[32, 0]]  # the second row has no zone yet
    state = layer.zone.states["learner"]["mean"].clone()
    zone = torch.stack(driver.rows[0][2:34], dim=1)[:, :, 0]
    torch.testing.assert_close(state[0, :, 0], zone.mean(1))
    torch.testing.assert_close(layer.codes["learner"]["keys"][0, :, :32], zone - zone.mean(1, keepdim=True))
    for _ in range(30):
        driver.step()
    layer.finish_step()
    assert torch.equal(layer.zone.states["learner"]["mean"][0], state[0])
    assert len(made.views) == 2  # and once for the second row, when its first block left
    codes = layer.codes["learner"]
    for row, zone_tokens in enumerate(layer.zones):
        held = torch.stack(driver.rows[row][2 : 2 + zone_tokens], dim=1)[:, :, 0]
        mean = layer.zone.states["learner"]["mean"][row]
        torch.testing.assert_close(codes["keys"][row, :, :zone_tokens], held - mean)
        torch.testing.assert_close(codes["total"][row], held.sum(1))


def test_rows_whose_state_is_stale_are_fitted_again_and_encoded_anew_from_the_store() -> None:
    made = Relearner(after=16)
    registry = Registry.load(entry_points=False)
    offer(registry, made)
    bound = bind(parse_config({"layers": {"default": {"retriever": "exact", "encode": "learner"}}}), 1, registry)[0]
    driver = Driver(new_layer(Window(2, 8, 8, 0), bound, 2, new_tokens=40), [0, 16])
    driver.prefill(50, 50)
    layer = driver.layer
    state = layer.zone.states["learner"]["mean"]
    address = state.data_ptr()
    first = state.clone()
    for _ in range(16):
        driver.step()
    layer.finish_step()
    assert layer.zones == [56, 40]
    # Each row was asked after each of its two blocks; the prefill left zones of 40 and 24 tokens.
    assert [since for *_, since in made.asked] == [[8, 8], [16, 16]]
    assert [fitted for _, _, fitted, _ in made.asked] == [[40, 24], [40, 24]]
    assert [view[0] for view in made.views] == [[40, 24], [56, 40]]
    assert layer.zone.refits == 2
    assert state.data_ptr() == address  # a captured step reads it there
    assert not torch.equal(state, first)
    for row in range(2):
        zone = torch.stack(driver.rows[row], dim=1)[:, 2 : 2 + layer.zones[row], 0]
        torch.testing.assert_close(state[row, :, 0], zone.mean(1))
        codes = layer.codes["learner"]
        torch.testing.assert_close(codes["keys"][row, :, : layer.zones[row]], zone - zone.mean(1, keepdim=True))
        torch.testing.assert_close(codes["total"][row], zone.sum(1))  # and not the old sum on top
        newest = zone[:, -8:]
        torch.testing.assert_close(made.asked[-1][0][row], newest)
    assert torch.equal(made.asked[-1][1], first)
    torch.testing.assert_close(*driver.step())


def test_only_the_stale_row_is_fitted_again() -> None:
    made = Relearner(after=8)
    registry = Registry.load(entry_points=False)
    offer(registry, made)
    bound = bind(parse_config({"layers": {"default": {"retriever": "exact", "encode": "learner"}}}), 1, registry)[0]
    driver = Driver(new_layer(Window(2, 8, 8, 0), bound, 2, new_tokens=40), [0, 16])
    driver.prefill(50, 50)
    before = driver.layer.zone.states["learner"]["mean"].clone()
    for _ in range(8):
        driver.step([False, True])
    driver.layer.finish_step()
    assert [view[0] for view in made.views] == [[40, 24], [0, 32]]
    assert torch.equal(driver.layer.zone.states["learner"]["mean"][0], before[0])
    assert not torch.equal(driver.layer.zone.states["learner"]["mean"][1], before[1])


def test_a_prompt_of_one_chunk_is_kept_as_it_came_but_not_what_it_is_a_part_of() -> None:
    info = LayerInfo(0, 1, 2, 1, 4, torch.float32, torch.device("cpu"), 1.0)
    own, fused = torch.randn(1, 2, 9, 4), torch.randn(1, 9, 3, 2, 4)
    prompt = BufferedPrompt(info, 9)
    keys, values = prompt.append(own, fused[:, :, 2].transpose(1, 2))
    assert keys.data_ptr() == own.data_ptr()
    assert torch.equal(values, fused[:, :, 2].transpose(1, 2))
    assert values.untyped_storage().nbytes() == values.nbytes  # the queries beside them may go
