"""How many answers a configuration's evaluation asks for, and what decoding them takes at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pariskv.config import EvaluationConfig
from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.catalogue import check_tasks, samples_of
from pariskv.evaluation.tasks.gpqa import GPQADiamond
from pariskv.evaluation.tasks.longbench2 import ANSWER_TOKENS, THOUGHT_TOKENS
from pariskv.evaluation.tasks.maths import BoxedProblems
from pariskv.evaluation.tasks.ruler import NAMES as RULER
from pariskv.evaluation.tasks.ruler import max_new_tokens

PUBLISHED: dict[str, tuple[int, int]] = {
    "longbench2": (503, ANSWER_TOKENS),
    "longbench2_cot": (503, THOUGHT_TOKENS),
    "gpqa_diamond": (198, GPQADiamond.max_new_tokens),
    "math500": (500, BoxedProblems.max_new_tokens),
    "aime25": (30, BoxedProblems.max_new_tokens),
}
"""Items, and tokens of an answer, of the published sets, unless the configuration says otherwise."""

LONG = ("longbench2", "longbench2_cot")
"""Sets whose prompts are as long as a context; the others' prompts are short beside their answers."""


@dataclass(frozen=True)
class Answers:
    """`count` answers of `new_tokens` tokens each, to prompts of `prompt` tokens."""

    count: int
    prompt: int
    new_tokens: int

    def seconds(self, of_batch: Callable[[int, int, int], float], batch: int) -> float:
        """Of all of them, `batch` at a time and the rest together; of_batch(prompt, new_tokens, rows): of one batch."""
        whole, rest = divmod(self.count, batch)
        found = whole * of_batch(self.prompt, self.new_tokens, batch) if whole else 0.0
        return found + (of_batch(self.prompt, self.new_tokens, rest) if rest else 0.0)


def answers_of(asked: EvaluationConfig, context: int, short: int = 1) -> list[Answers]:
    """What each retriever is asked, every answer at its longest; thoughts and what is asked after them are two answers.

    context  tokens to which the prompts of `LONG` and their answers are taken to extend
    short    tokens of which the other published sets' prompts are taken to be
    Raises ConfigError for an unknown task, and for RULER without a limit, which has as many items as are wanted.
    """
    check_tasks(asked.tasks)
    found = []
    for name in asked.tasks:
        if name in PUBLISHED:
            items, longest = PUBLISHED[name]
            new = asked.max_new_tokens or longest
            count = min(items, asked.limit or items) * (asked.samples or samples_of(name))
            found.append(Answers(count, context - new if name in LONG else short, new))
            if name == "longbench2_cot":
                found.append(Answers(count, new, ANSWER_TOKENS))
            continue
        if asked.limit is None:
            raise ConfigError(f"evaluation.limit: {name} has as many items as are wanted; set a number")
        for one in RULER if name == "ruler" else (name,):
            new = asked.max_new_tokens or max_new_tokens(one)
            found += [Answers(asked.limit * (asked.samples or 1), length - new, new) for length in asked.lengths]
    return found
