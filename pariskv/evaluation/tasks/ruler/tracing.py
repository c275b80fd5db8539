"""RULER's variable tracking: a value is handed on through a chain of assignments, hidden in hay; who has it?"""

from __future__ import annotations

import itertools
import random
import string

from pariskv.evaluation.tasks.item import Item
from pariskv.evaluation.tasks.ruler.base import CountTokens, RulerTask
from pariskv.evaluation.tasks.ruler.made import distinct
from pariskv.needle import HAY as NOISE

HOPS = 4
EXAMPLE_NOISE = 5


class VariableTracking(RulerTask):
    """One chain of four hops, five variables, after a worked example."""

    max_new_tokens = 30
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {query} in the text above."
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        "the value {query}, they are:"
    )

    def __init__(self, length: int, count_tokens: CountTokens, seed: int = 0):
        super().__init__("vt", length, count_tokens, "repeated sentences", seed)

    def make(self, rng: random.Random, name: str, units: int) -> Item:
        text, value, names = _chain(rng, EXAMPLE_NOISE)
        example = self._filled(text, value)
        text, value, wanted = _chain(rng, units)
        ours = self._filled(text, value)
        context, mark, rest = ours.partition("\nQuestion:")
        question, answer, begun = rest.partition(" Answer:")
        shown = f"{example} {' '.join(names)}\n\n{context}"
        return Item(name, shown, mark + question, tuple(wanted), answer + begun)

    def _filled(self, text: str, value: str) -> str:
        return self.prompt.format(context=text, query=value, count=HOPS + 1)


def _chain(rng: random.Random, noise: int) -> tuple[str, str, list[str]]:
    """A text with a chain in it, the value, and the names of the variables that have it."""
    names = distinct(lambda one: "".join(one.choices(string.ascii_uppercase, k=5)), HOPS + 1, rng)
    value = str(rng.randrange(10_000, 100_000))
    places = sorted(rng.random() for _ in names)
    sentences = [NOISE.strip()] * noise
    given = [f"VAR {names[0]} = {value}"]
    given += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(names)]
    for place, sentence in reversed(list(zip(places, given, strict=True))):
        sentences.insert(round(place * len(sentences)), f"{sentence}.")
    return "\n".join(sentences), value, names
