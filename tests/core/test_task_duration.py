"""What an evaluation is asked, and the times on the page about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pariskv.config import EvaluationConfig, load_config
from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.duration import Answers, answers_of

PAPER = Path(__file__).parents[2] / "configs" / "paper"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-8b-aime25", [Answers(240, 1, 32_768)]),
        ("qwen3-8b-gpqa", [Answers(198, 1, 32_768)]),
        ("qwen3-8b-math500", [Answers(500, 1, 32_768)]),
        ("qwen3-8b-longbench2", [Answers(503, 40_960 - 1024, 1024), Answers(503, 1024, 128)]),
    ],
)
def test_a_configuration_asks_for_so_many_answers(name: str, expected: list[Answers]) -> None:
    asked = load_config(PAPER / f"{name}.yaml", []).evaluation
    assert answers_of(asked, 40_960) == expected


def test_longbench2_that_does_not_think_asks_once() -> None:
    assert answers_of(EvaluationConfig(tasks=["longbench2"]), 4096) == [Answers(503, 4096 - 128, 128)]


def test_ruler_asks_its_thirteen_at_every_length() -> None:
    found = answers_of(load_config(PAPER / "qwen3-8b-ruler.yaml", []).evaluation, 40_960)
    assert len(found) == 13 * 4
    assert {one.count for one in found} == {100}
    assert {one.prompt + one.new_tokens for one in found} == {4096, 8192, 16_384, 32_768}
    assert sum(one.new_tokens for one in found) == 4 * (8 * 128 + 30 + 120 + 50 + 2 * 32)


def test_limits_and_samples_of_the_configuration_count() -> None:
    asked = EvaluationConfig(tasks=["aime25"], limit=10, samples=2, max_new_tokens=100)
    assert answers_of(asked, 4096) == [Answers(20, 1, 100)]
    assert answers_of(asked, 4096, 700) == [Answers(20, 700, 100)]
    with pytest.raises(ConfigError, match=r"evaluation\.limit: vt has as many items as are wanted; set a number"):
        answers_of(EvaluationConfig(tasks=["vt"]), 4096)


def test_the_last_batch_has_the_rest() -> None:
    asked: list[tuple[int, int, int]] = []

    def of_batch(prompt: int, new_tokens: int, batch: int) -> float:
        asked.append((prompt, new_tokens, batch))
        return 10.0 + batch

    assert Answers(11, 5, 7).seconds(of_batch, 4) == 2 * 14 + 13
    assert asked == [(5, 7, 4), (5, 7, 3)]
    assert Answers(3, 5, 7).seconds(of_batch, 4) == 13
    assert Answers(8, 5, 7).seconds(of_batch, 4) == 28
