"""RULER's published material, and what stands in for it: hay, questions about documents."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.data import Found, Published, find, has
from pariskv.evaluation.tasks.ruler.made import own_haystack

Haystack = Literal["auto", "own", "published"]
"""auto: published where it is on this machine, else our own; own; published: downloaded where it is not here."""

HAYSTACKS: tuple[Haystack, ...] = ("auto", "own", "published")

ESSAYS = Published(
    "ruler/PaulGrahamEssays.json",
    "RULER's scripts/data/synthetic/json/download_paulgraham_essay.py",
    ("opencompass/NeedleBench", "PaulGrahamEssays.jsonl"),
)
SQUAD = Published(
    "ruler/squad.json",
    "rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    sha256=("80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",),
)
HOTPOTQA = Published(
    "ruler/hotpotqa.json",
    "curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json, or its copy on the hub, namlh2004/hotpotqa",
    ("namlh2004/hotpotqa", "hotpot_dev_distractor_v1.json"),
    # The authors' file of 46,320,117 bytes, and the copy of 61,065,698.
    sha256=(
        "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        "e3da074df24e8369009918aa5cdbdd254dadcde4c63f7569d36afd6f2268caa8",
    ),
)
OWN_HAY = "own haystack: the help topics of Python's standard library"


@dataclass(frozen=True)
class Hay:
    """The words of the essays, or of what stands in for them; `about` says which."""

    words: tuple[str, ...]
    about: str

    def take(self, count: int) -> list[str]:
        """So many of the words, as published from the first one on, and again where they end."""
        return list(itertools.islice(itertools.cycle(self.words), count))


@dataclass(frozen=True)
class Question:
    """A question, what answers it, and the documents that one must have read."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """Questions, and documents to hide theirs among."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]
    about: str


@dataclass(frozen=True)
class Material:
    """Where RULER's tasks get what is not random."""

    folder: Path | None
    haystack: Haystack = "auto"

    def __post_init__(self) -> None:
        if self.haystack not in HAYSTACKS:
            raise ConfigError(f"--haystack: got {self.haystack!r}, wanted one of {', '.join(HAYSTACKS)}")

    def hay(self) -> Hay:
        found = self._published(ESSAYS)
        return _essays(found) if found else Hay(own_haystack(), OWN_HAY)

    def squad(self) -> Library | None:
        """SQuAD's questions, None where our own stand in."""
        found = self._published(SQUAD)
        return _squad(found) if found else None

    def hotpotqa(self) -> Library | None:
        """HotpotQA's questions, None where our own stand in."""
        found = self._published(HOTPOTQA)
        return _hotpotqa(found) if found else None

    def _published(self, published: Published) -> Found | None:
        if self.haystack == "own" or (self.haystack == "auto" and not has(published, self.folder)):
            return None
        return find(published, self.folder)


def _checked(read: Callable[[Found], Any]) -> Callable[[Found], Any]:
    """A reader whose file lacks what it looks for raises ConfigError."""

    @functools.cache
    def checked(found: Found) -> Any:
        try:
            return read(found)
        except (KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"{found.path}: not the file that was expected: {error!r}") from error

    return checked


@_checked
def _essays(found: Found) -> Hay:
    words = tuple(word for row in found.rows() for word in row["text"].split())
    return Hay(words, f"essays of Paul Graham: {found}")


@_checked
def _squad(found: Found) -> Library:
    paragraphs = [part for article in found.rows()[0]["data"] for part in article["paragraphs"]]
    questions = [
        Question(one["question"], tuple(dict.fromkeys(a["text"] for a in one["answers"])), (part["context"],))
        for part in paragraphs
        for one in part["qas"]
        if not one["is_impossible"]
    ]
    return Library(
        tuple(questions), tuple(dict.fromkeys(part["context"] for part in paragraphs)), f"SQuAD 2.0: {found}"
    )


@_checked
def _hotpotqa(found: Found) -> Library:
    rows = found.rows()
    read = [tuple(f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]) for row in rows]
    questions = [
        Question(row["question"], (row["answer"],), documents) for row, documents in zip(rows, read, strict=True)
    ]
    every = dict.fromkeys(document for documents in read for document in documents)
    return Library(tuple(questions), tuple(every), f"HotpotQA: {found}")
