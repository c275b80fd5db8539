"""Rows of a layer come and go: cropped, copied, exchanged, against a plain list of tokens with dense attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_driving import WINDOWS, D, Driver, H, Learner, new_layer, offer, pipeline

from pariskv.binding import bind
from pariskv.config import parse_config
from pariskv.layer import LayerState
from pariskv.registry import Registry
from pariskv.types import Store
from pariskv.window import Window

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["step", "crop", "copy", "take", "end"]), st.integers(0, 99), st.integers(0, 99)),
    max_size=14,
)


def common(one: list[torch.Tensor], two: list[torch.Tensor]) -> int:
    """How many tokens two rows begin with in common."""
    same = 0
    while same < min(len(one), len(two)) and torch.equal(one[same], two[same]):
        same += 1
    return same


@settings(max_examples=60, deadline=None)
@given(
    window=WINDOWS,
    columns=st.integers(1, 40),
    pads=st.lists(st.integers(0, 39), min_size=2, max_size=3),
    retriever=st.sampled_from(["exact", "dense", "pariskv", "pqcache"]),
    actions=ACTIONS,
)
def test_rows_that_come_and_go_attend_to_their_own_tokens(
    window: Window, columns: int, pads: list[int], retriever: str, actions: list[tuple[str, int, int]]
) -> None:
    bound = pipeline(retriever)
    driver = Driver(new_layer(window, bound, len(pads), 4), [min(pad, columns - 1) for pad in pads])
    driver.prefill(columns, 7)
    layer, active = driver.layer, [True] * len(pads)
    for action, a, b in actions:
        row, other = a % len(pads), b % len(pads)
        if action == "step":
            for _ in range(1 + b % 7):
                driver.check(active)
            continue
        layer.finish_step()
        if action == "crop":
            driver.crop(row, min(b, len(driver.rows[row])))
        elif action == "copy" and other != row:
            layer.take_row(row, layer, other, common(driver.rows[row], driver.rows[other]))
            driver.rows[row] = list(driver.rows[other])
        elif action == "take":
            fresh = Driver(new_layer(window, bound, 1, 3), [0], seed=1000 + a)
            fresh.prefill(1 + b % 45, 5)
            for _ in range(b % 4):
                fresh.check([True])
            fresh.layer.finish_step()
            layer.take_row(row, fresh.layer, 0)
            driver.rows[row] = list(fresh.rows[0])
        elif action == "end":
            active[row] = not active[row]
    driver.check(active)
    layer.finish_step()
    assert layer.lengths == [len(row) for row in driver.rows]


def test_an_opened_batch_is_filled_row_by_row() -> None:
    window, bound = Window(2, 3, 4), pipeline("pariskv")
    layer = new_layer(window, bound, 3)
    layer.open_rows()
    driver = Driver(layer, [0, 0, 0])
    for row in (2, 0):
        fresh = Driver(new_layer(window, bound, 1), [0], seed=row)
        fresh.prefill(30 + row, 8)
        layer.take_row(row, fresh.layer, 0)
        driver.rows[row] = list(fresh.rows[0])
    driver.rows[1] = [torch.zeros(H, 2, D, dtype=torch.float64)]  # what `dense` needs of a row that nobody looks at
    for _ in range(20):
        driver.check([True, False, True])
    layer.finish_step()
    assert layer.lengths[1] == 0


def test_sums_follow_the_rows() -> None:
    """Fields that are added up over a row's tokens hold what the row now holds, and nothing of what it held."""
    registry, made = Registry.load(entry_points=False), Learner()
    offer(registry, made)
    values = {"retriever": "exact", "encode": "learner", "top_k": 400, "candidates": 1.0}
    bound = bind(parse_config({"layers": {"default": values}}), 1, registry)[0]
    driver = Driver(new_layer(Window(2, 3, 4), bound, 2), [0, 7])
    driver.prefill(40, 9)
    layer = driver.layer
    layer.crop(0, 23)
    assert_sums(layer, driver, [23, 33])
    layer.take_row(1, layer, 0, common=0)
    driver.rows[1] = driver.rows[0]
    assert_sums(layer, driver, [23, 23])


def assert_sums(layer: LayerState, driver: Driver, lengths: list[int]) -> None:
    assert layer.lengths == lengths
    for row, zone in enumerate(layer.zones):
        held = torch.stack(driver.rows[row][2 : 2 + zone], dim=1)[:, :, 0]
        torch.testing.assert_close(layer.codes["learner"]["total"][row], held.sum(1))


def test_a_store_that_cannot_forget_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(new_layer(Window(2, 3, 4), pipeline(), 1), [0])
    driver.prefill(40, 40)
    monkeypatch.setattr(type(driver.layer.store), "crop", Store.crop)
    with pytest.raises(
        Exception, match=r"ResidentStore: row 0 is to go back to 16 tokens.*implements no crop"
    ) as error:
        driver.layer.crop(0, 24)
    assert "crop: the store of retriever 'resident'" in error.value.__notes__[0]
