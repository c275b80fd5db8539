"""Many requests through one batch, whose rows are given to waiting prompts as they end (continuous batching).

    read      a prompt goes through the model by itself, in a cache of one row, and its row moves into the batch; the
              cache is emptied for the next prompt
    step      one token of every row; rows that have ended cost no retrieval, and are free
    apart     a step that failed: its requests are answered again, each by itself, so that only the one at fault fails

A request's tokens are those that it would have had alone: rows share the steps and nothing else.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pariskv.config import GenerationConfig, RuntimeConfig
from pariskv.decode import Batch, Stepper, decode, make_steps, prefill, refuse_not_finite
from pariskv.errors import ConfigError, ModelError, PluginContractError, described
from pariskv.sampling import NOT_FINITE, Sampler

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.transformers import ParisCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask:
    """A request: token ids of its prompt, how many new tokens it gets at most, the seed of its sampling.

    seed  None: the configuration's
    """

    tokens: Sequence[int]
    max_new_tokens: int
    seed: int | None = None


@dataclass
class Answer:
    """What became of request `index`; `error` says why it ended early, with the tokens that it had by then."""

    index: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False  # by one of the model's end tokens
    error: str = ""


class Batching:
    """Answers requests, `rows` at a time.

    new_cache  an empty cache of the model and configuration
    chunk      (tokens of a prompt) -> how many of them go through the model at a time, None for all
    """

    def __init__(
        self,
        model: LanguageModel,
        new_cache: Callable[[], ParisCache],
        rows: int,
        settings: GenerationConfig,
        runtime: RuntimeConfig,
        chunk: Callable[[int], int | None] = lambda tokens: None,
    ):
        if rows < 1:
            raise ConfigError(f"batch size: got {rows}, wanted at least 1")
        self.model, self.new_cache, self.rows = model, new_cache, rows
        self.settings, self.runtime, self.chunk = settings, runtime, chunk

    def answers(self, asks: Sequence[Ask | None]) -> Iterator[Answer]:
        """The answers as they are ready, in whatever order; nothing for a None."""
        if self.rows == 1:
            yield from self.by_themselves(asks)
            return
        waiting = deque(index for index, ask in enumerate(asks) if ask is not None)
        alone = deque[int]()
        while waiting:
            batch = _Running(self, asks, waiting, alone)
            try:
                yield from batch.answers()
            except Exception as error:
                why = described(error)
                logger.warning("a step of %d requests failed (%s); each is answered by itself", batch.busy, why)
                alone.extendleft(reversed(batch.requests))
            del batch
            gc.collect()  # before memory is asked for again
            while alone:
                yield self.alone(asks, alone.popleft())

    def by_themselves(self, asks: Sequence[Ask | None]) -> Iterator[Answer]:
        """The answers in order, one request after the other."""
        for index, ask in enumerate(asks):
            if ask is not None:
                yield self.alone(asks, index)

    def alone(self, asks: Sequence[Ask | None], index: int) -> Answer:
        """The answer to request `index`, by itself."""
        ask, answer = asks[index], Answer(index)
        assert ask is not None
        try:
            cache = self.new_cache()
            batch = self.batch_of(ask)
            logits = self.read(cache, batch, ask)
            settings = replace(self.settings, max_new_tokens=ask.max_new_tokens)
            for (token,) in decode(self.model, cache, batch, logits, settings, self.runtime):
                assert token is not None
                answer.tokens.append(token)
                answer.ended = token in self.model.eos_ids
        except Exception as error:
            answer.error = described(error)
        return answer

    def read(self, cache: ParisCache, batch: Batch, ask: Ask) -> Tensor:
        """The prompt through the model; logits [1, V]."""
        return prefill(self.model, cache, batch, ask.max_new_tokens, self.chunk(len(ask.tokens)))

    def batch_of(self, ask: Ask) -> Batch:
        """The prompt as a batch of one row."""
        batch = self.model.batch_of([ask.tokens])
        return batch if ask.seed is None else replace(batch, seeds=[ask.seed])


class _Running:
    """A batch that runs: what is in which row."""

    def __init__(self, owner: Batching, asks: Sequence[Ask | None], waiting: deque[int], alone: deque[int]):
        self.owner, self.asks, self.waiting, self.alone = owner, asks, waiting, alone
        self.model, rows = owner.model, owner.rows
        self.in_row: list[Answer | None] = [None] * rows
        self.cache: ParisCache | None = None
        self.reader: ParisCache | None = None  # empty, for the next prompt: its memory is there already
        self.sampler = Sampler(owner.settings, rows)
        self.steps: Stepper | None = None

    @property
    def requests(self) -> list[int]:
        """Those that are in a row."""
        return [answer.index for answer in self.in_row if answer is not None]

    @property
    def busy(self) -> int:
        return len(self.requests)

    @torch.no_grad()
    def answers(self) -> Iterator[Answer]:
        """Until no request waits and no row is busy."""
        while True:
            yield from self._fill()
            if not self.busy:
                return
            yield from self._step()

    def _fill(self) -> Iterator[Answer]:
        """Give the free rows to prompts that wait."""
        while self.waiting and None in self.in_row:
            index, row = self.waiting.popleft(), self.in_row.index(None)
            try:
                answer = self._read(index, row)
            except Exception as error:  # its own, or for want of memory beside the others: that shows when it is alone
                logger.info("prompt %d is answered by itself later: %s", index, described(error))
                self.alone.append(index)
            else:
                if self._is_done(answer):
                    yield answer
                else:
                    self.in_row[row] = answer

    def _read(self, index: int, row: int) -> Answer:
        """Read a prompt, put it into a row, and choose its first token."""
        ask = self._ask(index)
        single, self.reader = self.reader, None
        if single is None:
            single = self.owner.new_cache()
        batch = self.owner.batch_of(ask)
        logits = self.owner.read(single, batch, ask)
        token = int(self.sampler.restart(row, logits, ask.seed))
        answer = Answer(index, [token], token in self.model.eos_ids)
        if not self._is_done(answer):
            self._take(row, single, len(ask.tokens))
        if self.waiting:
            self._keep(single)
        return answer

    def _keep(self, single: ParisCache) -> None:
        """For the next prompt, unless a plugin's store cannot forget what it holds."""
        try:
            single.clear()
        except PluginContractError as error:
            logger.info("the next prompt is read into a new cache: %s", error)
        else:
            self.reader = single

    def _take(self, row: int, single: ParisCache, tokens: int) -> None:
        rows, device = self.owner.rows, self.model.device
        if self.cache is None:
            known = [ask for ask in self.asks if ask is not None]
            longest, new = max(len(ask.tokens) for ask in known), max(ask.max_new_tokens for ask in known)
            self.cache = self.owner.new_cache()
            self.cache.open_rows(rows, longest, new)
            mask = torch.zeros(rows, 1, dtype=torch.bool, device=device) if self.cache.needs_mask else None
            batch = Batch(torch.zeros(rows, 1, dtype=torch.int64, device=device), mask)
            self.steps = make_steps(self.model, self.cache, batch, self.sampler, self.owner.runtime, device)
        assert self.steps is not None
        self.cache.take_row(row, single)
        self.steps.place(row, tokens, self.cache.get_seq_length())

    def _step(self) -> Iterator[Answer]:
        """One token of every busy row; yields the answers that it completes."""
        assert self.cache is not None
        assert self.steps is not None
        self.cache.set_active([answer is not None for answer in self.in_row])
        newest = [self.model.pad_id if answer is None else answer.tokens[-1] for answer in self.in_row]
        sampled = self.steps.step(torch.tensor(newest, device=self.model.device).unsqueeze(1)).tolist()
        for row, answer in enumerate(self.in_row):
            if answer is None:
                continue
            try:
                refuse_not_finite([sampled[row] != NOT_FINITE], f"decode step {len(answer.tokens)}")
            except ModelError as error:
                answer.error = described(error)
            else:
                answer.tokens.append(sampled[row])
                answer.ended = sampled[row] in self.model.eos_ids
            if answer.error or self._is_done(answer):
                self.in_row[row] = None
                yield answer

    def _is_done(self, answer: Answer) -> bool:
        return answer.ended or len(answer.tokens) >= self._ask(answer.index).max_new_tokens

    def _ask(self, index: int) -> Ask:
        ask = self.asks[index]
        assert ask is not None
        return ask
