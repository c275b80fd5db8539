"""Forks share the rows that they began with; each is a request of its own beside a plain list of tokens."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_driving import WINDOWS, Driver, Learner, Relearner, new_layer, offer, pipeline
from pariskv_plugins.resident import ResidentStore

from pariskv.binding import bind
from pariskv.config import parse_config
from pariskv.errors import BindingError, CapacityError
from pariskv.fork import ForkedStore, refuse_fork
from pariskv.layer import LayerState
from pariskv.registry import Registry
from pariskv.request import Request
from pariskv.window import Window

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "fork", "crop", "copy", "end", "free"]), *(st.integers(0, 99) for _ in range(3))
    ),
    max_size=16,
)


def fork(driver: Driver, seed: int, new_tokens: int = 16) -> Driver:
    driver.layer.finish_step()
    request = Request(prompt_tokens=driver.layer.columns, new_tokens=new_tokens)
    other = Driver(driver.layer.fork(request), driver.pads, seed)
    other.rows = copy.copy([list(row) for row in driver.rows])
    return other


def read(columns: int, pads: list[int] | None = None, retriever: str = "exact", window: Window | None = None) -> Driver:
    pads = pads or [0]
    driver = Driver(new_layer(window or Window(2, 3, 4), pipeline(retriever), len(pads)), pads)
    driver.prefill(columns, 7)
    return driver


@settings(max_examples=60, deadline=None)
@given(
    window=WINDOWS,
    columns=st.integers(1, 40),
    pads=st.lists(st.integers(0, 39), min_size=1, max_size=2),
    retriever=st.sampled_from(["exact", "dense", "pariskv", "pqcache"]),
    actions=ACTIONS,
)
def test_every_fork_attends_to_its_own_tokens(
    window: Window, columns: int, pads: list[int], retriever: str, actions: list[tuple[str, int, int, int]]
) -> None:
    """Forks of forks that go on, go back, exchange rows and end, in any order."""
    drivers = [read(columns, [min(pad, columns - 1) for pad in pads], retriever, window)]
    for seed, (action, which, a, b) in enumerate(actions, start=1):
        driver, row = drivers[which % len(drivers)], a % len(pads)
        layer = driver.layer
        if action == "step":
            for _ in range(1 + b % 9):
                driver.check()
            continue
        layer.finish_step()
        if action == "fork":
            drivers.append(fork(driver, seed, 1 + b % 20))
        elif action == "crop":
            driver.crop(row, min(b, len(driver.rows[row])))
        elif action == "copy":
            other = b % len(pads)
            if other != row:
                layer.take_row(row, layer, other)
                driver.rows[row] = list(driver.rows[other])
        elif action == "end":
            active = [index != row for index in range(len(pads))]
            driver.check(active)
        elif action == "free" and len(drivers) > 1:
            drivers.remove(driver)
    for driver in drivers:
        driver.check()
        driver.layer.finish_step()
        assert driver.layer.lengths == [len(row) for row in driver.rows]


def bytes_of(layers: list[LayerState]) -> int:
    return sum(layer.store.host_bytes for layer in layers if layer.store is not None)


def tail_bytes(driver: Driver) -> int:
    store = driver.layer.store
    assert isinstance(store, ForkedStore)
    return store.tail.host_bytes if store.tail is not None else 0


def test_what_is_shared_is_counted_once_whoever_is_left() -> None:
    drivers = [read(90)]
    held = bytes_of([drivers[0].layer])
    drivers += [fork(drivers[0], seed) for seed in range(1, 4)]
    assert bytes_of([one.layer for one in drivers]) == held
    for _ in range(9):
        drivers[2].check()
    tail = bytes_of([one.layer for one in drivers]) - held
    assert tail == tail_bytes(drivers[2]) > 0
    for left in (3, 2, 1):
        del drivers[0]
        gc.collect()
        assert bytes_of([one.layer for one in drivers]) == held + (tail if left > 1 else 0)


def test_forks_share_one_copy_of_rows_and_codes_until_they_add_to_them() -> None:
    driver = read(90, retriever="pariskv")
    other = fork(driver, 1)
    mine, others = driver.layer.store, other.layer.store
    assert isinstance(mine, ForkedStore)
    assert isinstance(others, ForkedStore)
    assert mine.base is others.base
    codes, others_codes = driver.layer.codes["pariskv"], other.layer.codes["pariskv"]
    rows = [name for name, field in codes.spec.items() if field.reduce is None]
    assert rows
    assert all(codes[name] is others_codes[name] for name in rows)
    before = {name: tensor.clone() for name, tensor in codes.fields.items()}
    for _ in range(9):
        other.check()
    for name, tensor in before.items():
        assert torch.equal(codes[name], tensor)
        assert others_codes[name] is not codes[name]


def test_a_fork_that_goes_back_writes_to_nobody_elses_codes() -> None:
    driver = read(60, retriever="pariskv")
    other = fork(driver, 1)
    before = {name: tensor.clone() for name, tensor in driver.layer.codes["pariskv"].fields.items()}
    other.layer.crop(0, 20)
    del other.rows[0][20:]
    for _ in range(12):
        other.check()
    for name, tensor in before.items():
        assert torch.equal(driver.layer.codes["pariskv"].fields[name], tensor)
    driver.check()


@pytest.mark.parametrize("make", [Learner, lambda: Relearner(8)])
def test_what_a_fork_learns_is_its_own(make: Callable[[], Learner]) -> None:
    registry = Registry.load(entry_points=False)
    offer(registry, make())
    values = {"retriever": "exact", "encode": "learner", "top_k": 400, "candidates": 1.0}
    bound = bind(parse_config({"layers": {"default": values}}), 1, registry)[0]
    driver = Driver(new_layer(Window(2, 3, 4), bound, 1), [0])
    driver.prefill(40, 9)
    other = fork(driver, 1)
    total, mean = (one.clone() for one in (driver.layer.codes["learner"]["total"], state_of(driver)))
    for _ in range(30):
        other.check()
    assert torch.equal(driver.layer.codes["learner"]["total"], total)
    assert torch.equal(state_of(driver), mean)
    other.layer.finish_step()
    zone = other.layer.zones[0]
    held = torch.stack(other.rows[0][2 : 2 + zone], dim=1)[:, :, 0]
    torch.testing.assert_close(other.layer.codes["learner"]["total"][0], held.sum(1))


def state_of(driver: Driver) -> torch.Tensor:
    return driver.layer.zone.states["learner"]["mean"]


def test_a_captured_step_is_made_anew_where_a_fork_moves_rows() -> None:
    driver = read(60)
    before = driver.layer.shape
    other, back = fork(driver, 1), fork(driver, 2)
    assert driver.layer.shape != before
    shapes = []
    for _ in range(40):
        other.check()
        shapes.append(other.layer.shape)
    assert 2 <= len(set(shapes)) < 5, "a step is captured once in a while, not at every update"
    back.layer.crop(0, 20)
    del back.rows[0][20:]
    moved = back.layer.shape
    for _ in range(12):
        back.check()
    assert back.layer.store is not None
    assert back.layer.store.capacity == driver.layer.store.capacity  # type: ignore[union-attr]
    assert back.layer.shape != moved


def test_a_store_whose_rows_cannot_be_shared_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = read(60)
    monkeypatch.setattr(ResidentStore, "can_fork", False)
    with pytest.raises(BindingError, match=r"layer 0: the store of retriever 'resident' \(ResidentStore\) cannot be"):
        refuse_fork(driver.layer.pipeline, driver.layer.store)


def test_a_full_fork_says_so() -> None:
    driver = read(60)
    other = fork(driver, 1)
    store, update = other.layer.store, other.layer.pipeline.update
    assert isinstance(store, ForkedStore)
    assert update is not None
    block = torch.zeros(1, 2, 5, 16, dtype=torch.float64)
    with pytest.raises(CapacityError, match=r"fork: row 0 holds 5\d of 5\d tokens, and 5 more came"):
        update(block, block, store, [0])
    assert store.tail is None
