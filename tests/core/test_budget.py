"""The candidates rule against the definition, counted one zone length at a time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pariskv.budget import CandidateRule
from pariskv.errors import ConfigError


def auto_by_definition(zone_tokens: int, top_k: int) -> int:
    """The paper's table in per cent, so that no fraction is rounded."""
    if zone_tokens < 5_000:
        percent = 50
    elif zone_tokens < 10_000:
        percent = 25
    elif zone_tokens < 30_000:
        percent = 20
    else:
        percent = 10
    return min(zone_tokens, max(-(-zone_tokens * percent // 100), top_k))


def test_auto_follows_the_table_of_the_paper() -> None:
    rule = CandidateRule.parse("auto")
    for zone_tokens in [*range(0, 40_000, 7), 4_999, 5_000, 9_999, 10_000, 29_999, 30_000, 1_000_003]:
        for top_k in (0, 1, 512, 6_000):
            assert rule.count(zone_tokens, top_k) == auto_by_definition(zone_tokens, top_k), zone_tokens


def test_a_ratio_is_the_decimal_that_was_written() -> None:
    assert CandidateRule.parse(0.1).count(30, 1) == 3  # 0.1 * 30 is 3.0000000000000004 for a float that rounds up
    assert CandidateRule.parse(0.07).count(100, 1) == 7
    assert CandidateRule.parse(1e-05).count(300_000, 1) == 3
    assert CandidateRule.parse(1.0).count(30, 1) == 30


@given(st.integers(1, 1000), st.integers(0, 3000), st.integers(0, 700))
def test_a_ratio_is_rounded_up_between_top_k_and_the_zone(thousandths: int, zone_tokens: int, top_k: int) -> None:
    count = CandidateRule.parse(thousandths / 1000).count(zone_tokens, top_k)
    assert count == min(zone_tokens, max(-(-zone_tokens * thousandths // 1000), top_k))


@given(st.integers(1, 1000), st.integers(0, 3000), st.integers(0, 700))
def test_a_count_is_held_between_top_k_and_the_zone(count: int, zone_tokens: int, top_k: int) -> None:
    assert CandidateRule.parse(count).count(zone_tokens, top_k) == min(zone_tokens, max(count, top_k))


def test_one_is_a_count_and_one_point_zero_a_ratio() -> None:
    assert CandidateRule.parse(1).count(100, 0) == 1
    assert CandidateRule.parse(1.0).count(100, 0) == 100


def test_without_a_rerank_there_are_exactly_top_k_candidates() -> None:
    rule = CandidateRule.first_top_k()
    assert [rule.count(zone_tokens, 10) for zone_tokens in (0, 9, 10, 11, 10_000)] == [0, 9, 10, 10, 10]
    assert rule.width(10_000, 10) == 10


@pytest.mark.parametrize("rule", ["auto", 0.3, 700], ids=str)
@pytest.mark.parametrize("top_k", [0, 100, 2_600, 7_000])
def test_width_is_the_largest_count_of_any_zone_up_to_the_capacity(rule: str | float | int, top_k: int) -> None:
    parsed, largest = CandidateRule.parse(rule), 0
    for capacity in range(33_000):
        largest = max(largest, parsed.count(capacity, top_k))
        if capacity % 997 == 0 or capacity in (4_999, 5_000, 5_001, 9_999, 10_000, 29_999, 30_000):
            assert parsed.width(capacity, top_k) == largest, capacity


def test_the_width_of_a_longer_zone_is_not_its_own_count() -> None:
    rule = CandidateRule.parse("auto")
    assert (rule.count(4_999, 0), rule.count(9_000, 0), rule.width(9_000, 0)) == (2_500, 2_250, 2_500)


@given(st.integers(0, 60_000), st.integers(0, 60_000), st.integers(0, 2_000))
def test_no_count_passes_the_width(zone_tokens: int, more: int, top_k: int) -> None:
    rule = CandidateRule.parse("auto")
    assert rule.count(zone_tokens, top_k) <= rule.width(zone_tokens + more, top_k)


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, -0.1, math.nan, math.inf, True, "half", "0.1"])
def test_what_is_no_rule_is_refused(value: str | float | int) -> None:
    with pytest.raises(ConfigError, match=r"^candidates: got .*, wanted auto, a ratio \(a float with 0 < ratio <= 1\)"):
        CandidateRule.parse(value)
