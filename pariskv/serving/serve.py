"""A file of prompts answered by a session: `pariskv run CONFIG --prompts FILE`."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pariskv.config import to_dict
from pariskv.errors import CapacityError, ConfigError, ParisKVError
from pariskv.planner import chunk_for
from pariskv.serving.batching import Answer, Ask, Batching
from pariskv.serving.journal import Journal, Result, sha256_of
from pariskv.serving.prompts import PromptLine, read_prompts
from pariskv.session import Session

Progress = Callable[[int, int, int], None]
"""Called with (requests done, requests in all, of these failed)."""


@dataclass
class Served:
    """What became of a file of prompts."""

    results: list[Result]  # in the prompts' order
    resumed: int = 0  # of these, those that an earlier run had left

    @property
    def failed(self) -> int:
        return sum("error" in result for result in self.results)


def answer_file(
    session: Session,
    path: Path,
    rows: int,
    output: Path | None = None,
    resume: bool = False,
    progress: Progress = lambda done, total, failed: None,
) -> Served:
    """Answer the prompts of a file, `rows` at a time; a prompt that fails is a result with an `error`.

    output  where the results go, and what a run that was interrupted leaves; None: nowhere
    resume  go on with what an interrupted run left
    """
    lines = read_prompts(path)
    if output is None:
        if resume:
            raise ConfigError("--resume: wanted --output too, beside which the interrupted run left its journal")
        return _serve(session, lines, rows, {}, None, progress)
    config = to_dict(session.config)
    # Not the runtime: it changes how fast an answer comes, and what it may take.
    belongs = {"prompts": sha256_of(path), "config": {key: one for key, one in config.items() if key != "runtime"}}
    journal = Journal(output, belongs, resume)
    served = _serve(session, lines, rows, journal.done, journal, progress)
    journal.finish()
    return served


def _serve(
    session: Session,
    lines: Sequence[PromptLine],
    rows: int,
    done: dict[int, Result],
    journal: Journal | None,
    progress: Progress,
) -> Served:
    resumed, found = len(done), dict(done)

    def keep(result: Result) -> None:
        found[int(result["index"])] = result
        if journal is not None:
            journal.add(result)
        progress(len(found), len(lines), sum("error" in one for one in found.values()))

    progress(len(found), len(lines), 0)
    asks: list[Ask | None] = []
    for line in lines:
        ask = None
        if line.index not in found:
            try:
                ask = _ask(session, line)
            except ParisKVError as error:
                keep(_result(line, None, None, str(error)))
        asks.append(ask)
    together = list(asks)
    apart: list[Ask | None] = [None] * len(asks)
    room = _Room(session, asks)
    for index, ask in enumerate(asks):
        if ask is not None and not room.has(rows, ask):
            together[index] = None
            try:
                room.refuse(ask)
                apart[index] = ask
            except CapacityError as error:
                keep(_result(lines[index], None, None, str(error)))
    batching = _batching(session, rows)
    for answer in itertools.chain(batching.answers(together), batching.by_themselves(apart)):
        line, ask = lines[answer.index], asks[answer.index]
        keep(_result(line, ask, answer, answer.error, session.model.decode(answer.tokens)))
    return Served([result for _, result in sorted(found.items())], resumed)


def _batching(session: Session, rows: int) -> Batching:
    config = session.config
    return Batching(
        session.model,
        session.new_cache,
        rows,
        config.generation,
        config.runtime,
        lambda tokens: chunk_for(config.prefill.chunk, tokens),
    )


class _Room:
    """Which requests the memory holds, by the planner: the longest prompt is asked about first, mostly the only one."""

    def __init__(self, session: Session, asks: Sequence[Ask | None]):
        known = [ask for ask in asks if ask is not None]
        self.is_checked = session.config.runtime.check_memory and bool(known)
        self.lengths = sorted({len(ask.tokens) for ask in known})
        self.new_tokens = max((ask.max_new_tokens for ask in known), default=0)
        self.planner = session.new_cache().planner
        self._longest: dict[int, int] = {}

    def has(self, rows: int, ask: Ask) -> bool:
        """Whether a batch of `rows` such requests fits."""
        return not self.is_checked or len(ask.tokens) <= self._longest_in(rows)

    def refuse(self, ask: Ask) -> None:
        """Raise CapacityError where the request does not fit by itself."""
        self.planner.refuse(1, len(ask.tokens), ask.max_new_tokens)

    def _longest_in(self, rows: int) -> int:
        if rows not in self._longest:
            fitting = bisect.bisect_left(self.lengths, True, key=lambda tokens: not self._fits(rows, tokens))
            self._longest[rows] = self.lengths[fitting - 1] if fitting else 0
        return self._longest[rows]

    def _fits(self, rows: int, tokens: int) -> bool:
        try:
            self.planner.refuse(rows, tokens, self.new_tokens)
        except CapacityError:
            return False
        return True


def _ask(session: Session, line: PromptLine) -> Ask:
    """A line as tokens; raises ConfigError and CapacityError for what cannot be answered."""
    if line.error:
        raise ConfigError(line.error)
    generation = session.config.generation
    new = line.max_new_tokens or generation.max_new_tokens
    tokens = session.model.encode([line.text], generation.chat).tokens[0].tolist()
    session.refuse_beyond_context(len(tokens), new)
    return Ask(tokens, new)


def _result(line: PromptLine, ask: Ask | None, answer: Answer | None, error: str, text: str = "") -> Result:
    found: dict[str, Any] = {"index": line.index}
    if line.id is not None:
        found["id"] = line.id
    if answer is not None and ask is not None:
        found |= {"text": text, "prompt_tokens": len(ask.tokens), "new_tokens": len(answer.tokens)}
        found |= {"finish": "end" if answer.ended else "length"} if not error else {}
    return found | ({"error": error} if error else {})
