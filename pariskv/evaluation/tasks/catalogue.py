"""The tasks by name: what `--tasks` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.gpqa import GPQADiamond
from pariskv.evaluation.tasks.item import Task
from pariskv.evaluation.tasks.longbench2 import LongBench2
from pariskv.evaluation.tasks.maths import AIME25_SAMPLES, aime25, math500
from pariskv.evaluation.tasks.ruler import NAMES as RULER
from pariskv.evaluation.tasks.ruler import ruler_task
from pariskv.evaluation.tasks.ruler.base import CountTokens
from pariskv.evaluation.tasks.ruler.published import Haystack, Material
from pariskv.structured import did_you_mean

SUITES = ("ruler", "longbench2", "longbench2_cot", "gpqa_diamond", "math500", "aime25")
NAMES = (*SUITES, *RULER)
"""`ruler` is all of its thirteen tasks; each can be named by itself."""

LIKELIHOOD = ("hellaswag", "mmlu", "arc_easy", "arc_challenge", "winogrande", "piqa", "boolq", "longbench2_likelihood")
"""Well-known tasks that compare the likelihoods of given answers."""


@dataclass(frozen=True)
class Choice:
    """What tasks are made from.

    lengths  of RULER's prompts with their answers, in tokens
    data     the folder of `--data`
    """

    names: Sequence[str]
    lengths: Sequence[int]
    data: Path | None
    haystack: Haystack
    seed: int


def check_tasks(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that no task has, or none at all."""
    if not names:
        raise ConfigError(f"--tasks: got none, wanted some of {', '.join(SUITES)}, or set evaluation.tasks")
    for name in names:
        if name in LIKELIHOOD:
            raise ConfigError(
                f"--tasks: {name} compares the likelihoods of given answers, which are read in the prefill: nothing is "
                f"decoded and no retriever runs, so its score would say nothing; use a task that generates"
            )
        if name not in NAMES:
            raise ConfigError(
                f"--tasks: unknown task {name!r}{did_you_mean(name, NAMES)}; there are {', '.join(NAMES)}"
            )


def samples_of(name: str) -> int:
    """Answers to each item of a task, where nobody asks for another number."""
    return AIME25_SAMPLES if name == "aime25" else 1


def make_tasks(choice: Choice, count_tokens: CountTokens) -> list[Task]:
    """The tasks, RULER's at every length; ConfigError where one is unknown or its data are missing."""
    check_tasks(choice.names)
    found: dict[str, Task] = {}
    for name in choice.names:
        for task in _make(name, choice, count_tokens):
            found.setdefault(task.name, task)
    return list(found.values())


def _make(name: str, choice: Choice, count_tokens: CountTokens) -> Sequence[Task]:
    if name in ("longbench2", "longbench2_cot"):
        return [LongBench2(choice.data, thinks=name == "longbench2_cot")]
    if name == "gpqa_diamond":
        return [GPQADiamond(choice.data, choice.seed)]
    if name == "math500":
        return [math500(choice.data)]
    if name == "aime25":
        return [aime25(choice.data)]
    material = Material(choice.data, choice.haystack)
    names = RULER if name == "ruler" else (name,)
    return [ruler_task(one, length, count_tokens, material, choice.seed) for length in choice.lengths for one in names]
