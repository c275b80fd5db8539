"""What RULER's thirteen tasks share: a length that counts the answer's room, items made from a seed, their scores."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pariskv.evaluation.tasks.answers import share_found
from pariskv.evaluation.tasks.item import Item, Source
from pariskv.evaluation.tasks.ruler.made import largest_fitting

ITEMS = 500
"""Items of each task and length, as published."""

CountTokens = Callable[[Item], int]
"""Tokens of an item's prompt by the model's tokenizer, chat template and beginning of the answer included."""


class RulerTask(ABC):
    """One task at one length; `length` counts the prompt and the room for the answer.

    Source: RULER (arXiv 2404.06654), section 3 and appendix.
    """

    suite = "ruler"
    samples = 1
    pass_at: Sequence[int] = ()
    max_new_tokens: int
    prompt: str
    least = 0  # units of hay in the smallest prompt

    def __init__(self, kind: str, length: int, count_tokens: CountTokens, data: str, seed: int = 0):
        self.kind, self.length, self.seed = kind, length, seed
        self.name = f"{kind}@{length}"
        self.count_tokens = count_tokens
        self.source = Source(f"RULER {kind}", "arXiv 2404.06654", "Apache-2.0", data, self.prompt)

    def __len__(self) -> int:
        return ITEMS

    def item(self, index: int) -> Item:
        def make(units: int) -> Item:
            return self.make(random.Random(f"{self.seed}/{self.kind}/{index}"), str(index), units)

        room = self.length - self.max_new_tokens
        return make(largest_fitting(lambda units: self.count_tokens(make(units)), room, self.least, self.name))

    def parts(self, query: str = "") -> tuple[str, str, str]:
        """The prompt before its context, the question behind it, and the beginning of the answer."""
        opening, _, rest = self.prompt.partition("{context}")
        question, mark, begun = (rest.format(query=query) if query else rest).rpartition(" Answer:")
        return opening, question, mark + begun

    @abstractmethod
    def make(self, rng: random.Random, name: str, units: int) -> Item:
        """The item with so much hay; the same question and answer, however much that is."""

    def score(self, item: Item, answer: str) -> float:
        return share_found(item.wanted, answer)
