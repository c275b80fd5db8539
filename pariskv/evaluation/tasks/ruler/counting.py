"""RULER's two counting tasks: the most common words of a list, and of a coded text."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from pariskv.evaluation.tasks.item import Item
from pariskv.evaluation.tasks.ruler.base import CountTokens, RulerTask
from pariskv.evaluation.tasks.ruler.made import distinct, words

COMMON = 10
"""Words that are asked for."""

SHORT = 4096
"""Below this length words repeat less often, or there were no room for others."""


@dataclass(frozen=True)
class Repeats:
    """How often the common words are in a list, and the others."""

    common: int
    other: int


class CommonWords(RulerTask):
    """Ten common words among others, after a worked example."""

    max_new_tokens = 120
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
        " Answer: The top 10 words that appear most often in the list are:"
    )

    def __init__(self, length: int, count_tokens: CountTokens, seed: int = 0):
        is_short = length < SHORT
        self.repeats = Repeats(6, 1) if is_short else Repeats(30, 3)
        self.example = (Repeats(3, 1), 10) if is_short else (Repeats(10, 3), 30)
        super().__init__("cwe", length, count_tokens, "nouns and adjectives of wonderwords", seed)

    def make(self, rng: random.Random, name: str, units: int) -> Item:
        shown, answer = _list(rng, *self.example)
        opening, question, begun = self.parts()
        listed, wanted = _list(rng, self.repeats, units)
        answered = " ".join(f"{index}. {one}" for index, one in enumerate(answer, 1))
        example = f"{opening}{shown}{question}{begun} {answered}\n\n"
        return Item(name, example + opening + listed, question, tuple(wanted), begun)


def _list(rng: random.Random, repeats: Repeats, others: int) -> tuple[str, list[str]]:
    """A numbered list in random order, and its common words."""
    both = [*words("noun"), *words("adjective")]
    own = random.Random(rng.random())
    common = own.sample(both, COMMON)
    rest = [own.choice(both) for _ in range(others)]
    rest = [one for one in rest if one not in set(common)]
    every = common * repeats.common + rest * repeats.other
    own.shuffle(every)
    return " ".join(f"{index}. {one}" for index, one in enumerate(every, 1)), common


class FrequentWords(RulerTask):
    """Made-up words whose frequencies fall by a power law; the three most frequent but for the dots."""

    max_new_tokens = 50
    alpha = 2.0
    coded_letters = 6
    least = 50
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )

    def __init__(self, length: int, count_tokens: CountTokens, seed: int = 0):
        super().__init__("fwe", length, count_tokens, "random words", seed)
        self.vocabulary = max(10, length // 50)

    def make(self, rng: random.Random, name: str, units: int) -> Item:
        coded = distinct(self._word, self.vocabulary, rng)
        shares = [index**-self.alpha for index in range(1, self.vocabulary + 1)]
        counts = [max(1, round(units * share / sum(shares))) for share in shares]
        counts[:5] = [count + 5 - index for index, count in enumerate(counts[:5])]  # never as many of two
        every = [one for one, count in zip(["....", *coded[1:]], counts, strict=True) for _ in range(count)]
        random.Random(rng.random()).shuffle(every)
        opening, question, begun = self.parts()
        return Item(name, opening + " ".join(every), question, tuple(coded[1:4]), begun)

    def _word(self, rng: random.Random) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=self.coded_letters))
