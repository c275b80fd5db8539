"""RULER's two question tasks: documents, one or two of which answer a question; the others are hay."""

from __future__ import annotations

import random

from pariskv.evaluation.tasks.answers import any_found
from pariskv.evaluation.tasks.item import Item
from pariskv.evaluation.tasks.ruler.base import ITEMS, CountTokens, RulerTask
from pariskv.evaluation.tasks.ruler.made import word, words
from pariskv.evaluation.tasks.ruler.published import Library, Question

OWN = {
    "qa_1": "own documents: made-up buildings and who designed them",
    "qa_2": "own documents: made-up buildings, where they stand, and when these towns were founded",
}
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
SYLLABLES = [f"{first}{second}" for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "an", "en", "or")]


class Questions(RulerTask):
    """qa_1: one document answers (SQuAD). qa_2: two do (HotpotQA). Our own documents where these are not at hand."""

    max_new_tokens = 32
    prompt = (
        f"{INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n"
        f"{INSTRUCTION}\n\nQuestion: {{query}} Answer:"
    )

    def __init__(self, kind: str, length: int, count_tokens: CountTokens, library: Library | None, seed: int = 0):
        self.library = library
        super().__init__(kind, length, count_tokens, library.about if library else OWN[kind], seed)

    def __len__(self) -> int:
        return min(ITEMS, len(self.library.questions)) if self.library else ITEMS

    def make(self, rng: random.Random, name: str, units: int) -> Item:
        asked = self.library.questions[int(name)] if self.library else self._made_up(rng)
        order = random.Random(rng.random())
        documents = [*asked.documents, *self._others(rng, asked, units)]
        order.shuffle(documents)
        position = documents.index(asked.documents[0]) / max(1, len(documents) - 1)
        text = "\n\n".join(f"Document {index}:\n{one}" for index, one in enumerate(documents, 1))
        opening, question, begun = self.parts(asked.text)
        place = position if len(asked.documents) == 1 else None
        return Item(name, opening + text, question, asked.answers, begun, position=place)

    def _others(self, rng: random.Random, asked: Question, count: int) -> list[str]:
        own = random.Random(rng.random())
        if self.library is None:
            found = [document for _ in range(count) for document in self._made_up(own).documents]
            return found[:count]
        others = own.sample(self.library.documents, min(len(self.library.documents), count + len(asked.documents)))
        return [one for one in others if one not in asked.documents][:count]

    def score(self, item: Item, answer: str) -> float:
        return any_found(item.wanted, answer)

    def _made_up(self, rng: random.Random) -> Question:
        building = f"the {word(rng).replace('-', ' ')} {rng.choice(('tower', 'library', 'bridge', 'theatre', 'mill'))}"
        town, year, other = _name(rng), str(rng.randrange(1000, 1900)), str(rng.randrange(1900, 2020))
        person = f"{_name(rng)} {_name(rng)}"
        visited = rng.choice(words("noun"))
        about = (
            f"{building.capitalize()} stands in {town}. It was designed by {person} and opened in {other}. "
            f"Visitors know it for its {visited}."
        )
        if self.kind == "qa_1":
            return Question(f"Who designed {building}?", (person,), (about,))
        history = f"{town} is a town by a river. It was founded in {year} and has a market for every kind of {visited}."
        return Question(f"In which year was the town founded in which {building} stands?", (year,), (about, history))


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=3)).capitalize()
