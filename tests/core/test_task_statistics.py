"""Estimators against closed forms, and what a table says of made-up records."""

from __future__ import annotations

from itertools import combinations
from math import comb, sqrt

import pytest

from pariskv.evaluation.tasks.evaluation import Record
from pariskv.evaluation.tasks.statistics import mcnemar, mean, paired_bootstrap, pass_at_k, standard_error
from pariskv.evaluation.tasks.summary import by_class, classes_of, summarise


@pytest.mark.parametrize("samples", [1, 4, 8])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        answers = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            chosen = [any(some) for some in combinations(answers, k)]
            assert pass_at_k(samples, right, k) == pytest.approx(mean(chosen))
    assert pass_at_k(samples, samples // 2, 1) == pytest.approx(samples // 2 / samples)


def test_pass_at_k_of_fewer_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted 1 <= k <= 4"):
        pass_at_k(4, 1, 8)


def test_the_error_of_right_and_wrong_answers_is_the_binomials() -> None:
    scores = [1.0] * 30 + [0.0] * 70
    assert standard_error(scores) == pytest.approx(sqrt(0.3 * 0.7 / 99))
    assert standard_error([1.0]) is None
    assert standard_error([0.5] * 10) == 0


def test_mcnemar_is_the_two_sided_binomial_test() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(3, 3) == 1
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(5, 0) == mcnemar(0, 5)
    assert mcnemar(2, 8) == pytest.approx(2 * sum(comb(10, i) for i in range(3)) / 1024)


def test_the_bootstrap_covers_the_mean_as_the_normal_interval_does() -> None:
    differences = [1.0] * 30 + [0.0] * 40 + [-1.0] * 30
    low, high = paired_bootstrap(differences)
    error = standard_error(differences)
    assert error is not None
    assert (low, high) == pytest.approx((-1.96 * error, 1.96 * error), abs=0.01)
    assert paired_bootstrap([0.0] * 8) == (0, 0)
    assert paired_bootstrap(differences) == (low, high)  # the same each time


def record(retriever: str, index: int, score: float | None, sample: int = 0, **more: object) -> Record:
    base = Record("t@1024", str(index), index, sample, retriever, score, "text", ["x"], 10, 5, True)
    return Record(**{**base.to_dict(), "too_long": score is None, **more})  # type: ignore[arg-type]


def test_a_row_pairs_a_retriever_with_dense_attention_item_by_item() -> None:
    dense = [record("dense", index, float(index < 6)) for index in range(8)]
    ours = [record("ours", index, float(index in (0, 1, 2, 7))) for index in range(8)]
    rows = {row.retriever: row for row in summarise(dense + ours, {})}
    assert rows["dense"].score == 0.75
    assert rows["dense"].paired is None
    paired = rows["ours"].paired
    assert paired is not None
    assert (paired.won, paired.lost, paired.items) == (1, 3, 8)
    assert paired.difference == pytest.approx(-0.25)
    assert paired.p == pytest.approx(mcnemar(1, 3))
    assert paired.interval[0] < -0.25 < paired.interval[1]


def test_samples_are_averaged_within_an_item_first() -> None:
    scores = {0: (1, 0, 0, 0), 1: (1, 1, 1, 1)}
    records = [record("dense", i, float(s), k) for i, of in scores.items() for k, s in enumerate(of)]
    (row,) = summarise(records, {"t@1024": (4, 8)})
    assert row.score == pytest.approx((0.25 + 1) / 2)
    assert row.error == pytest.approx(standard_error([0.25, 1.0]))
    assert (row.items, row.samples) == (2, 4)
    assert row.pass_at == {"pass@4": 1.0}  # of four samples nobody knows pass@8


def test_fractions_have_no_mcnemar() -> None:
    rows = summarise([record("dense", 0, 0.5), record("ours", 0, 0.75)], {})
    assert rows[1].paired is not None
    assert rows[1].paired.p is None


def test_what_is_too_long_is_counted_and_in_no_score() -> None:
    records = [record("dense", 0, 1.0), record("dense", 1, None), record("dense", 2, 0.0, ended=False)]
    (row,) = summarise(records, {})
    assert (row.score, row.items, row.too_long, row.cut) == (0.5, 2, 1, 1)
    (nothing,) = summarise([record("dense", 0, None)], {})
    assert (nothing.score, nothing.items, nothing.too_long) == (None, 0, 1)


def test_classes_are_the_tasks_own_the_length_and_the_position() -> None:
    groups = {"difficulty": "hard"}
    records = [record("dense", i, float(i), position=p, groups=groups) for i, p in enumerate((0.1, 1.0))]
    found = {(one.kind, one.name): one.score for one in by_class(records, classes_of)}
    assert found == {
        ("t: difficulty", "hard"): 0.5,
        ("length", "1,024 tokens"): 0.5,
        ("position", "0% to 20%"): 0,
        ("position", "80% to 100%"): 1,
    }
