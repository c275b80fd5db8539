"""What a run consists of: tasks x items x samples in batches, each answered by every retriever.

A unit is a batch of answers to one task. Units are the same in every process of a run, whatever was done before: so
shards, workers and an interrupted run that goes on all answer the same prompts in the same batches.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pariskv.compare import PROTOCOLS, check_names, config_for
from pariskv.config import DEFAULT, Config
from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.answering import Answer, Prompt, answer, count_tokens, encode
from pariskv.evaluation.tasks.catalogue import Choice, check_tasks, make_tasks
from pariskv.evaluation.tasks.item import Item, Task
from pariskv.evaluation.tasks.ruler.published import Haystack
from pariskv.lengths import is_beyond_context
from pariskv.registry import Registry

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel

DENSE = "dense"
AS_IT_IS = "config"
"""The name under which the configuration answers as the file has it, whatever its layers do."""


@dataclass(frozen=True)
class Settings:
    """What is asked, and who answers; everything else is in the configuration.

    limit, samples, max_new_tokens  None: as the task has it
    question                        whether the question is read densely with its context, or decoded (`sparse`)
    """

    tasks: tuple[str, ...]
    retrievers: tuple[str, ...]
    lengths: tuple[int, ...] = (4096,)
    limit: int | None = None
    samples: int | None = None
    max_new_tokens: int | None = None
    batch: int = 1
    question: str = "dense"
    haystack: Haystack = "auto"
    data: Path | None = None

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        twice = next((name for name in self.retrievers if self.retrievers.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"--retrievers: {twice!r} is listed twice; list it once")
        if self.question not in PROTOCOLS:
            raise ConfigError(f"--question: got {self.question!r}, wanted one of {', '.join(PROTOCOLS)}")

    def to_dict(self) -> dict[str, Any]:
        """What answers depend on: without the folder, whose files have their digests in the sources."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {key: value for key, value in values.items() if key != "data"}


@dataclass(frozen=True)
class Unit:
    """Some of a task's answers: number `start` to `stop` - 1, the samples of an item one after the other."""

    index: int
    task: int
    start: int
    stop: int


Key = tuple[str, int, int, str]
"""What a record is called: task, index of the item, sample, retriever."""


@dataclass(frozen=True)
class Job:
    """A unit for one retriever, and what its records will be called."""

    unit: Unit
    retriever: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Record:
    """One answer of one retriever.

    index      of the item in its task;   sample  which of its answers
    score      None where the prompt was too long for the model, and nothing was asked
    wanted     the right answers or their parts
    thoughts   the answer to the first of two requests, where the item has a second one, whose answer counts
    seconds    of the batch that it was answered in
    """

    task: str
    item: str
    index: int
    sample: int
    retriever: str
    score: float | None
    answer: str
    wanted: list[str]
    prompt_tokens: int
    new_tokens: int = 0
    ended: bool = False
    too_long: bool = False
    position: float | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    thoughts: str = ""

    @property
    def key(self) -> Key:
        return self.task, self.index, self.sample, self.retriever

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answered:
    """What came of a job: its records, and its prompts by the index of the item."""

    records: list[Record]
    prompts: dict[int, str]


def check_retrievers(config: Config, names: Sequence[str], registry: Registry) -> None:
    """Raise ConfigError for a name that no retriever, no instance and no configuration has."""
    check_names(config, [name for name in names if name != AS_IT_IS], registry)


def config_of(config: Config, retriever: str) -> Config:
    """The configuration that a retriever answers with."""
    if retriever == AS_IT_IS:
        return config
    top_k = config.layers[DEFAULT].top_k
    return config_for(config, retriever, 1 if top_k is None else top_k)


class Evaluation:
    """A model, the tasks and the retrievers of a run.

    Raises ConfigError where a task or its data, or a retriever, is not there.
    """

    def __init__(self, model: LanguageModel, config: Config, settings: Settings, registry: Registry | None = None):
        self.model, self.config, self.settings = model, config, settings
        check_retrievers(config, settings.retrievers, registry or Registry.load())
        self.configs = {name: config_of(config, name) for name in settings.retrievers}
        choice = Choice(settings.tasks, settings.lengths, settings.data, settings.haystack, config.generation.seed)
        self.tasks = make_tasks(choice, lambda item: count_tokens(model, item, config.generation.chat))

    @cached_property
    def units(self) -> list[Unit]:
        """Every unit of the run, task by task."""
        found: list[Unit] = []
        for index, task in enumerate(self.tasks):
            total = self.items(task) * self.samples(task)
            for start in range(0, total, self.settings.batch):
                found.append(Unit(len(found), index, start, min(start + self.settings.batch, total)))
        return found

    def items(self, task: Task) -> int:
        """How many items of a task are asked."""
        return min(len(task), self.settings.limit or len(task))

    def samples(self, task: Task) -> int:
        """How many answers each item gets."""
        return self.settings.samples or task.samples

    def new_tokens(self, task: Task) -> int:
        """Tokens of an answer at most; what RULER's lengths leave room for is the task's own."""
        return self.settings.max_new_tokens or task.max_new_tokens

    def asked(self, unit: Unit) -> Iterable[tuple[int, int, Item]]:
        """The (index of the item, sample, item) of a unit."""
        task = self.tasks[unit.task]
        known: dict[int, Item] = {}
        for number in range(unit.start, unit.stop):
            index, sample = divmod(number, self.samples(task))
            if index not in known:
                known[index] = task.item(index)
            yield index, sample, known[index]

    def jobs(self) -> list[Job]:
        """All that is to be done: each unit by each retriever, the retrievers of a unit one after the other."""
        return [Job(unit, name, self._keys(unit, name)) for unit in self.units for name in self.settings.retrievers]

    def _keys(self, unit: Unit, retriever: str) -> tuple[Key, ...]:
        task = self.tasks[unit.task]
        samples = self.samples(task)
        return tuple((task.name, *divmod(number, samples), retriever) for number in range(unit.start, unit.stop))

    def answer(self, job: Job) -> Answered:
        """The records of a job, and its prompts."""
        task, asked = self.tasks[job.unit.task], list(self.asked(job.unit))
        chat, seed = self.config.generation.chat, self.config.generation.seed
        prompts = [encode(self.model, item, chat, seed_of(seed, task.name, i, sample)) for i, sample, item in asked]
        return Answered(self._answer(task, asked, prompts, job.retriever), {i: item.prompt for i, _, item in asked})

    def _answer(
        self, task: Task, asked: Sequence[tuple[int, int, Item]], prompts: Sequence[Prompt], name: str
    ) -> list[Record]:
        started = time.perf_counter()
        first = self._decode(name, prompts, self.new_tokens(task))
        answers = self._conclude(name, [item for _, _, item in asked], prompts, first)
        seconds = time.perf_counter() - started
        records = []
        for number, (index, sample, item) in enumerate(asked):
            one, thoughts = answers[number], first[number] if item.second else None
            record = Record(
                task.name,
                item.id,
                index,
                sample,
                name,
                task.score(item, one.text) if one else None,
                one.text if one else "",
                list(item.wanted),
                len(prompts[number].tokens),
                one.tokens if one else 0,
                one.ended if one else False,
                one is None,
                item.position,
                dict(item.groups),
                seconds,
                thoughts.text if thoughts else "",
            )
            records.append(record)
        return records

    def _decode(self, name: str, prompts: Sequence[Prompt], new_tokens: int) -> list[Answer | None]:
        """The answers to a batch, None where a prompt is too long for the model."""
        fitting = [number for number, prompt in enumerate(prompts) if not self._is_too_long(prompt, new_tokens)]
        found: list[Answer | None] = [None] * len(prompts)
        if fitting:
            given = [prompts[number] for number in fitting]
            is_sparse = self.settings.question == "sparse"
            answers = answer(self.model, self.configs[name], given, new_tokens, is_sparse)
            for number, one in zip(fitting, answers, strict=True):
                found[number] = one
        return found

    def _conclude(
        self, name: str, items: Sequence[Item], prompts: Sequence[Prompt], first: Sequence[Answer | None]
    ) -> list[Answer | None]:
        """The answers to the second requests of a batch; the first ones where an item has no second."""
        chat, found = self.config.generation.chat, list(first)
        waiting = [
            (number, item.second, one)
            for number, (item, one) in enumerate(zip(items, first, strict=True))
            if item.second and one
        ]
        if not waiting:
            return found
        asked = [
            encode(self.model, second.item(items[number], one.text.strip()), chat, prompts[number].seed)
            for number, second, one in waiting
        ]
        answers = self._decode(name, asked, max(second.max_new_tokens for _, second, _ in waiting))
        for (number, _, thoughts), one in zip(waiting, answers, strict=True):
            found[number] = one and replace(
                one, tokens=thoughts.tokens + one.tokens, ended=thoughts.ended and one.ended
            )
        return found

    def _is_too_long(self, prompt: Prompt, new_tokens: int) -> bool:
        return is_beyond_context(self.config, self.model.context_length, len(prompt.tokens), new_tokens)


def seed_of(seed: int, task: str, item: int, sample: int) -> int:
    """A seed for each answer, so that neither batches nor shards change what is drawn."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{task}/{item}/{sample}".encode()).digest()[:7], "big")
