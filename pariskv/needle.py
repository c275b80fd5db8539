"""The needle test: a haystack of a given length, one sentence in it that matters, one question.

The form is that of RULER's first task (arXiv 2404.06654): repeated hay, a seven-digit number, a named key.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pariskv.errors import ConfigError

HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
OPENING = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = "One of the special magic numbers for long-context is: {answer}. "
QUESTION = (
    "\nWhat are all the special magic numbers for long-context mentioned in the provided text? "
    "The special magic numbers for long-context mentioned in the provided text are"
)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Needle:
    """A prompt of the test and the answer that it wants."""

    prompt: str
    answer: str

    def is_found(self, text: str) -> bool:
        return self.answer in text


def needle_prompt(tokens: int, count_tokens: CountTokens, depth: float = 0.5, seed: int = 0) -> Needle:
    """A needle test of at most `tokens` tokens, as many as whole sentences of hay allow.

    depth  where the needle lies: 0 at the beginning, 1 at the end
    Raises ConfigError where there is no room for needle and question.
    """
    answer = str(random.Random(seed).randrange(1_000_000, 10_000_000))
    needle = NEEDLE.format(answer=answer)

    def text(repeats: int) -> str:
        before = round(depth * repeats)
        return OPENING + HAY * before + needle + HAY * (repeats - before) + QUESTION

    smallest = count_tokens(text(0))
    if smallest > tokens:
        raise ConfigError(
            f"quickstart.prompt_tokens: the needle test without any hay takes {smallest} tokens, got {tokens}; "
            f"ask for at least {smallest}"
        )
    repeats = (tokens - smallest) // max(1, count_tokens(HAY * 2) - count_tokens(HAY))
    while repeats > 0 and count_tokens(text(repeats)) > tokens:
        repeats -= 1
    return Needle(text(repeats), answer)
