"""What a benchmark is made of: items with a question and the answers wanted, where they come from, how they score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True)
class Second:
    """A second request, for the answer itself: the answer to the first are thoughts, and stands in its prompt.

    before, after  the prompt around the thoughts
    """

    before: str
    after: str
    max_new_tokens: int

    def item(self, first: Item, thoughts: str) -> Item:
        """What is asked after the thoughts."""
        return replace(first, context=self.before + thoughts, question=self.after, answer_prefix="", second=None)


@dataclass(frozen=True)
class Item:
    """One question.

    id             names it within its task
    context        what is read densely in every protocol: the long text, or the problem without its last sentence
    question       the rest of the prompt: decoded by the retriever under `--question sparse`
    wanted         the right answers, or the parts of one (the task says which)
    answer_prefix  how the answer begins: text after the chat template's last turn was opened
    position       where in the context the answer lies, from 0 to 1; None where no place can be said
    groups         classes that scores are reported by, such as {"difficulty": "hard"}
    second         what is asked next, where the first answer is not yet what counts
    """

    id: str
    context: str
    question: str
    wanted: tuple[str, ...]
    answer_prefix: str = ""
    position: float | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    second: Second | None = None

    @property
    def prompt(self) -> str:
        """The whole text, without a chat template."""
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True)
class Source:
    """Where a task comes from, for the manifest and the report.

    data    what its items were made of: the file and its sha256, or how they were made up
    prompt  the prompt with places in braces
    """

    title: str
    version: str
    licence: str
    data: str
    prompt: str


class Task(Protocol):
    """A benchmark, or one of its parts.

    name            as tables and files call it, such as `niah_single_1@4096`
    suite           as `--tasks` calls it, such as `ruler`
    max_new_tokens  tokens of an answer at most
    samples         answers to each item, where nobody asks for another number
    pass_at         the k of every pass@k that is reported beside the mean
    """

    name: str
    suite: str
    source: Source
    max_new_tokens: int
    samples: int
    pass_at: Sequence[int]

    def __len__(self) -> int:
        """How many items there are."""
        ...

    def item(self, index: int) -> Item:
        """One of them; the same whenever it is asked for."""
        ...

    def score(self, item: Item, answer: str) -> float:
        """How good an answer is, from 0 to 1."""
        ...
