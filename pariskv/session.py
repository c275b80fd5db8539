"""A model with a configuration, ready to answer: what `pariskv run` and Python programs use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pariskv.config import Config, RuntimeConfig, load_config, to_dict
from pariskv.decode import Batch, DecodeCache, Progress, decode, generate, prefill
from pariskv.errors import CapacityError, ConfigError, described
from pariskv.graph import capture_reason
from pariskv.lengths import is_beyond_context
from pariskv.needle import Needle, needle_prompt
from pariskv.planner import chunk_for
from pariskv.report import Report

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.transformers import ParisCache
    from pariskv.prefix import Prefix


@dataclass
class Run:
    """What happened while one prompt was answered; filled as it goes, so an interruption keeps what there is."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prefill_seconds: float | None = None
    decode_seconds: float = 0.0
    steps: int = 0
    interrupted: bool = False
    error: str = ""  # why it ended early for want of memory, with the tokens that there were by then
    report: Report | None = None


class Session:
    """A loaded model and the configuration that its caches are made with.

    >>> session = Session.load("configs/smollm2.yaml")
    >>> for piece in session.stream("Why is the sky blue?"):
    ...     print(piece, end="", flush=True)
    """

    def __init__(self, model: LanguageModel, config: Config):
        self.model = model
        self.config = config
        self._is_warm = False

    @classmethod
    def load(cls, config: Config | str | Path | None = None, overrides: Sequence[str] = ()) -> Session:
        """Load the model that a configuration names (an object, a YAML file's path, None for the defaults)."""
        from pariskv.integrations.language_model import LanguageModel

        if not isinstance(config, Config):
            config = load_config(None if config is None else Path(config), overrides)
        return cls(LanguageModel.load(config), config)

    def stream(self, prompt: str) -> Iterator[str]:
        """The answer to a prompt, piece by piece."""
        from pariskv.integrations.language_model import TextStream

        text = TextStream(self.model)
        batch = self._batch([prompt])
        for (token,) in self._tokens(batch):
            if token is not None:
                yield text.push(token)

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """The answers to a batch of prompts."""
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"generate: wanted a list of at least one prompt, got {prompts!r}")
        batch = self._batch(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        for tokens in self._tokens(batch):
            for answer, token in zip(answers, tokens, strict=True):
                if token is not None:
                    answer.append(token)
        return [self.model.decode(answer) for answer in answers]

    def _tokens(self, batch: Batch) -> Iterator[list[int | None]]:
        cache, config = self.cache_for(batch), self.config
        return generate(self.model, cache, batch, config.generation, self._chunk(batch), runtime=config.runtime)

    def read_prefix(self, texts: Sequence[str], progress: Progress | None = None) -> Prefix:
        """Read the beginnings of prompts, one a row: to be saved (`pariskv.prefix`), or continued once.

        Through the chat template a text is the beginning of the user's turn, which `continue_prefix` ends.
        """
        from pariskv.prefix import Prefix

        settings = self.config.generation
        turns = [self.model.open_turn(text, settings.chat) for text in texts]
        batch = self.model.batch_of([ids for ids, _ in turns])
        self.refuse_beyond_context(batch.tokens.shape[1])
        cache = self.cache_for(batch)
        logits = prefill(self.model, cache, batch, settings.max_new_tokens, self._chunk(batch), progress)
        return Prefix(cache, batch, logits, turns[0][1])

    def load_prefix(self, path: str | Path, texts: Sequence[str] | None = None, sha256: str | None = None) -> Prefix:
        """A saved prefix, ready to be continued; refused by name where it does not belong to this session.

        texts   refuse it unless it is of these
        sha256  refuse it unless it is this file
        """
        from pariskv.prefix import load_prefix

        wanted = None
        if texts is not None:
            wanted = self.model.batch_of([self.model.open_turn(text, self.config.generation.chat)[0] for text in texts])
        return load_prefix(path, self.model, new_cache=self.cache_for, tokens=wanted, sha256=sha256)

    def continue_prefix(self, prefix: Prefix, question: str = "") -> Iterator[list[int | None]]:
        """Read the question as the end of every row's turn, then yield each step's new token per row."""
        rows, columns = prefix.batch.tokens.shape
        ending = self.model.plain_ids(question + prefix.tail) if question + prefix.tail else []
        self.refuse_beyond_context(columns + len(ending))
        if ending:
            added = self.model.batch_of([ending] * rows)
            prefix.append(self.model, added.tokens, self.config.generation.max_new_tokens, self._chunk(added))
            prefix.tail = ""
        yield from prefix.generate(self.model, self.config.generation, self.config.runtime)

    def needle(self) -> Needle:
        """The needle test that `quickstart` describes."""
        quick = self.config.quickstart
        return needle_prompt(quick.prompt_tokens, self.model.count_tokens, quick.depth, quick.seed)

    def run(
        self,
        prompt: str,
        needle: Needle | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        progress: Progress | None = None,
    ) -> Run:
        """Answer one prompt and measure it; Ctrl-C ends it early with what there is."""
        batch = self._batch([prompt], chat="off" if needle else self.config.generation.chat)
        cache = self.cache_for(batch)
        run = self._measure(cache, batch, on_text, progress, self.config.runtime)
        state = cache.request
        run.report = replace(
            self._report(run, needle),
            attended_tokens_per_step=state.attended_tokens_per_step if run.steps else None,
            kv_device_bytes=state.kv_device_bytes + cache.stock_bytes,
            kv_dense_bytes=state.kv_dense_bytes + cache.stock_bytes,
            kv_host_bytes=state.kv_host_bytes,
            code_bytes=state.code_bytes,
            prefill_history=state.prefill_history,
            calibration=cache.calibration,
        )
        return run

    def run_dense(
        self,
        prompt: str,
        needle: Needle | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        progress: Progress | None = None,
    ) -> Run:
        """The same through transformers' own dense cache and SDPA attention."""
        batch = self._batch([prompt], chat="off" if needle else self.config.generation.chat)
        with self.model.dense() as cache:
            run = self._measure(cache, batch, on_text, progress, RuntimeConfig(graph="off"))
            held = cache.nbytes
        attended = run.prompt_tokens + (run.steps + 1) / 2 if run.steps else None
        run.report = replace(
            self._report(run, needle),
            attended_tokens_per_step=attended,
            kv_device_bytes=held,
            kv_dense_bytes=held,
        )
        return run

    def _measure(
        self,
        cache: DecodeCache,
        batch: Batch,
        on_text: Callable[[str], None],
        progress: Progress | None,
        runtime: RuntimeConfig,
    ) -> Run:
        from pariskv.integrations.language_model import TextStream

        run, text = Run(prompt_tokens=batch.tokens.shape[1]), TextStream(self.model)
        settings = self.config.generation
        try:
            start = time.perf_counter()
            logits = prefill(self.model, cache, batch, settings.max_new_tokens, self._chunk(batch), progress)
            run.prefill_seconds = time.perf_counter() - start
            start = time.perf_counter()
            for (token,) in decode(self.model, cache, batch, logits, settings, runtime):
                run.decode_seconds = time.perf_counter() - start
                run.steps = len(run.tokens)
                assert token is not None
                run.tokens.append(token)
                on_text(text.push(token))
        except KeyboardInterrupt:
            run.interrupted = True
        except CapacityError as error:
            if not run.tokens:
                raise
            run.error = described(error)
        run.text = text.text
        return run

    def _report(self, run: Run, needle: Needle | None) -> Report:
        return Report(
            text=run.text,
            prompt_tokens=run.prompt_tokens,
            new_tokens=len(run.tokens),
            attended_tokens_per_step=None,
            kv_device_bytes=0,
            kv_dense_bytes=0,
            kv_host_bytes=0,
            code_bytes=0,
            prefill_tokens_per_s=run.prompt_tokens / run.prefill_seconds if run.prefill_seconds else None,
            decode_tokens_per_s=run.steps / run.decode_seconds if run.steps else None,
            answer_found=needle.is_found(run.text) if needle else None,
        )

    def _batch(self, prompts: Sequence[str], chat: str | None = None) -> Batch:
        batch = self.model.encode(prompts, chat or self.config.generation.chat)
        self.refuse_beyond_context(batch.tokens.shape[1])
        return batch

    def refuse_beyond_context(self, prompt_tokens: int, new_tokens: int | None = None) -> None:
        """Raise CapacityError where prompt and new tokens, by default those of the configuration, are too many."""
        context, new = self.model.context_length, new_tokens or self.config.generation.max_new_tokens
        if not is_beyond_context(self.config, context, prompt_tokens, new):
            return
        assert context is not None
        room = context - prompt_tokens
        remedy = f"lower generation.max_new_tokens to {room}" if room > 0 else "shorten the prompt"
        raise CapacityError(
            f"the prompt has {prompt_tokens} tokens and max_new_tokens is {new}, but the model's context is {context}; "
            f"{remedy}, or set model.allow_beyond_context=true"
        )

    def new_cache(self) -> ParisCache:
        """An empty cache of this model and configuration; nobody has asked whether a request fits the memory."""
        cache = self.model.new_cache(self.config)
        # Decoding asks again; what cannot be is refused here, before a long prompt is read.
        capture_reason(self.config.runtime, cache, self.model.device)
        if not self._is_warm:
            cache.warm_up()
            self._is_warm = True
        return cache

    def cache_for(self, batch: Batch) -> ParisCache:
        """An empty cache for a batch; raises CapacityError where the memory does not hold what it would take."""
        cache = self.new_cache()
        if self.config.runtime.check_memory:
            rows, prompt_tokens = batch.tokens.shape
            cache.planner.refuse(rows, prompt_tokens, self.config.generation.max_new_tokens)
        return cache

    def _chunk(self, batch: Batch) -> int | None:
        return chunk_for(self.config.prefill.chunk, batch.tokens.shape[1])


def run_to_dict(run: Run, config: Config) -> dict[str, object]:
    """What `pariskv run --json` prints of a run."""
    assert run.report is not None
    error = {"error": run.error} if run.error else {}
    return {**run.report.to_dict(), **error, "config": to_dict(config)}
