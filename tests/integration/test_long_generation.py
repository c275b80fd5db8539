"""Generation far beyond what was planned: beside store and codes nothing grows. The long version is the program."""

from __future__ import annotations

from long_generation import a_model, measure_memory

from pariskv import parse_config

WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}


def test_generation_beyond_the_plan_takes_store_and_codes_and_nothing_else() -> None:
    config = parse_config({"layers": {"default": {"top_k": 16}}, "window": WINDOW})
    first, *_, last = measure_memory(a_model(), 620, 200, config)
    assert last.step == 600
    assert last.store > 1.4 * first.store
    assert last.codes > 1.3 * first.codes
    assert last.rest <= 1.05 * first.rest
    # Rows of 2 x 16 x 4 bytes of 2 layers and 2 heads, and room for an eighth more.
    assert last.store <= 2 * 2 * 128 * (300 + 600) * 9 / 8
