"""RULER's eight needle tasks: sentences that name a value for a key, hidden in hay; some keys are asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pariskv.evaluation.tasks.item import Item
from pariskv.evaluation.tasks.ruler.base import CountTokens, RulerTask
from pariskv.evaluation.tasks.ruler.made import distinct, identifier, number, word
from pariskv.evaluation.tasks.ruler.published import Hay
from pariskv.needle import HAY as NOISE

DEPTHS = 40
"""Places in an essay, evenly spaced, at which needles lie."""

MAKE: dict[str, Callable[[random.Random], str]] = {"words": word, "numbers": number, "uuids": identifier}


@dataclass(frozen=True)
class Kind:
    """One needle task.

    hay     noise (sentences that repeat), essay (text), needle (further needles)
    keys    needles in the text, but for those that are hay;   values  of each key;   queries  keys asked for
    """

    hay: str
    key_type: str = "words"
    value_type: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", value_type="uuids"),
    "niah_multikey_1": Kind("essay", keys=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", key_type="uuids", value_type="uuids"),
    "niah_multivalue": Kind("essay", values=4),
    "niah_multiquery": Kind("essay", keys=4, queries=4),
}


class NeedleTask(RulerTask):
    max_new_tokens = 128
    prompt = (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the {kind} afterwards.\n{context}\n"
        "What are all the special magic {kind} for {query} mentioned in the provided text?"
        " The special magic {kind} for {query} mentioned in the provided text are"
    )
    single = (
        "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the {kind} afterwards.\n{context}\n"
        "What is the special magic {kind} for {query} mentioned in the provided text?"
        " The special magic {kind} for {query} mentioned in the provided text is"
    )

    def __init__(self, kind: str, length: int, count_tokens: CountTokens, hay: Hay, seed: int = 0):
        self.needles, self.hay = KINDS[kind], hay
        data = {"noise": "repeated sentences", "needle": "random needles", "essay": hay.about}[self.needles.hay]
        super().__init__(kind, length, count_tokens, data, seed)

    def make(self, rng: random.Random, name: str, units: int) -> Item:
        kind = self.needles
        keys = distinct(MAKE[kind.key_type], kind.keys, rng)
        values = {key: distinct(MAKE[kind.value_type], kind.values, rng) for key in keys}
        asked = rng.sample(keys, kind.queries)
        placed = [(self._depth(rng), key, value) for key in keys for value in values[key]]
        rng.shuffle(placed)
        context = self._context(rng, units, sorted(placed, key=lambda one: one[0]))
        wanted = tuple(value for key in asked for value in values[key])
        template = self.single if len(wanted) == 1 else self.prompt
        called = kind.value_type.removesuffix("s") if len(wanted) == 1 else kind.value_type
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        opening, _, rest = template.partition("{context}")
        question, mark, prefix = rest.partition("?")
        return Item(
            name,
            opening.format(kind=called) + context,
            (question + mark).format(kind=called, query=query),
            wanted,
            prefix.format(kind=called, query=query),
            position=next((depth for depth, key, _ in placed if key == asked[0]), None) if len(wanted) == 1 else None,
        )

    def _context(self, rng: random.Random, units: int, needles: list[tuple[float, str, str]]) -> str:
        """The hay with every needle at its depth."""
        kind = self.needles
        pieces = self._pieces(rng, units)
        hay = len(pieces)
        for depth, key, value in reversed(needles):
            pieces.insert(int(depth * hay), sentence(kind.value_type, key, value))
        return (" " if kind.hay == "essay" else "\n").join(pieces)

    def _depth(self, rng: random.Random) -> float:
        """As published: in essays one of forty depths, both ends included; elsewhere before any piece of hay."""
        return rng.randrange(DEPTHS) / (DEPTHS - 1) if self.needles.hay == "essay" else rng.random()

    def _pieces(self, rng: random.Random, units: int) -> list[str]:
        kind = self.needles
        if kind.hay == "noise":
            return [NOISE.strip()] * units
        if kind.hay == "essay":
            words = self.hay.take(units * WORDS)
            return [" ".join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]
        # A generator of its own: what follows must not depend on how many there are.
        own = random.Random(rng.random())
        make_key, make_value = MAKE[kind.key_type], MAKE[kind.value_type]
        return [sentence(kind.value_type, make_key(own), make_value(own)) for _ in range(units)]


WORDS = 12
"""Words of an essay that are a unit: a needle never parts them."""


def sentence(value_type: str, key: str, value: str) -> str:
    """A needle."""
    return f"One of the special magic {value_type} for {key} is: {value}."
