"""The planner's scale: what is alive, what was at most, views once, and nothing that was there before."""

from __future__ import annotations

import pytest
import torch

from pariskv.meter import Meter, tensor_bytes
from pariskv.planner import largest
from pariskv.rehearsal import Curve, Figures


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_meter_counts_memory_once_and_for_as_long_as_it_lives(device: str) -> None:
    before = torch.zeros(500, device=device)
    with Meter() as meter:
        one = torch.zeros(1000, device=device)
        view = (one * 2)[:10]
        assert (meter.live, meter.peak) == (8000, 8000)
        del one
        assert meter.live == 4000  # ten elements keep all of them alive
        del view
        assert (meter.live, meter.peak) == (0, 8000)
        meter.restart()
        assert before[:5].add_(1).shape == (5,)
        assert (meter.live, meter.peak) == (0, 0)


def test_views_of_one_memory_are_its_bytes_once() -> None:
    one = torch.zeros(100)
    assert tensor_bytes([one, one[:50], torch.zeros(10)]) == 440


@pytest.mark.parametrize("most", range(12))
def test_the_largest_is_found(most: int) -> None:
    assert largest(lambda number: number <= most, 1, 10) == min(most, 10)


def test_a_curve_is_broken_lines_that_heads_and_rows_multiply() -> None:
    curve = Curve(
        (10, 20), (Figures(state=100, step=7), Figures(state=300, step=7)), [1, 1, 1, 2, 1], [1, 1, 1, 1.5, 1]
    )
    assert [curve.at(length, 1, 1).state for length in (5, 10, 15, 20, 30)] == [100, 100, 200, 300, 500]
    assert curve.at(10, 3, 3) == Figures(state=100 * 3 * 2, step=7)
