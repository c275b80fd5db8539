"""The region arithmetic against a plain list of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pariskv.window import Window

WINDOWS = st.builds(
    Window,
    sink=st.integers(0, 6),
    local=st.integers(1, 9),
    update=st.integers(1, 8),
    dense_below=st.integers(0, 40),
)


@settings(max_examples=200, deadline=None)
@given(window=WINDOWS, prompt=st.integers(1, 60), steps=st.integers(0, 80))
def test_a_plain_list_of_tokens_is_never_lost_or_doubled(window: Window, prompt: int, steps: int) -> None:
    """Replay the rules on lists: tokens leave in blocks of U once local + U wait, never below dense_below."""
    sink, zone, ring = [], [], []
    for position in range(prompt + steps):
        (sink if position < window.sink else ring).append(position)
        n = position + 1
        at_prompts_end = n >= prompt
        if at_prompts_end:
            while n >= window.dense_below and len(ring) >= window.local + window.update:
                zone += ring[: window.update]
                del ring[: window.update]
            assert window.zone(n) == len(zone)
            assert window.ring(n, len(zone)) == len(ring)
            assert [*sink, *zone, *ring] == list(range(n))


@settings(max_examples=200, deadline=None)
@given(window=WINDOWS, prompt=st.integers(1, 60), steps=st.integers(1, 80))
def test_a_ring_of_the_declared_capacity_never_overwrites_a_token(window: Window, prompt: int, steps: int) -> None:
    capacity = window.ring_capacity(prompt, prompt + steps)
    for n in range(prompt, prompt + steps):
        # The step's token is appended before the zone takes over.
        assert window.ring(n + 1, window.zone(n)) <= capacity


def test_a_window_without_zone_keeps_everything() -> None:
    window = Window(sink=4, local=8, update=8).without_zone()
    assert window.zone(10**9) == 0
    assert window.ring_capacity(100, 500) == 496


@pytest.mark.parametrize("window", [Window(4, 10, 8, 40), Window(0, 0, 1), Window(16, 64, 64, 10)])
def test_a_zone_ends_where_the_next_is_another(window: Window) -> None:
    for tokens in range(1, 300):
        last = window.last_of_zone(tokens)
        assert {window.zone(n) for n in range(tokens, last + 1)} == {window.zone(tokens)}
        assert window.zone(last + 1) != window.zone(tokens) or last + 1 == window.dense_below


def test_a_window_suits_what_is_indexed() -> None:
    window = Window(4, 10, 8, 40)
    assert window.suited_to("all") == window
    assert window.suited_to("none").zone(10_000) == 0
    fixed = window.suited_to("prompt")
    assert (fixed.zone(100), fixed.zone_from(80, 1000), window.zone_from(80, 1000)) == (80, 80, 984)
    assert fixed.last_of_zone(100) > 10**9
    # Nothing leaves the ring, so it holds all that is generated; while the prompt is read, it does not yet.
    assert fixed.ring_capacity(100, 1000) == 1000 - 4 - 80
    assert fixed.while_reading() == window
    # A row that goes back into the prompt keeps in the zone what was there, to the last whole update.
    assert (fixed.zone_before(60), window.zone_before(60)) == (56, 40)
