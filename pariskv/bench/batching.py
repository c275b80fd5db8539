"""`pariskv bench batching`: prompts of different lengths in one batch, beside one after the other.

Both go through `pariskv.serving.batching`, as `pariskv run --prompts` does: a prompt is read by itself either way, and
what a batch shares are the decode steps. A step's time is the difference between a long and a short run of the same
requests, both without reading, so that the capture of a graph is not in it either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, release
from pariskv.bench.synthetic import bench_config, bench_pipeline
from pariskv.bench.timing import require_cuda
from pariskv.config import Config, GenerationConfig
from pariskv.decode import Batch
from pariskv.errors import CapacityError, ConfigError
from pariskv.serving.batching import Answer, Ask, Batching

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.transformers import ParisCache


@dataclass(frozen=True)
class Settings:
    """What to measure: every combination of batch and store.

    sizes       of the model, as in `integrations.shapes`
    requests    how many prompts; their lengths are spread evenly from `shortest` to `longest` tokens, in random order
    new_tokens  of every request in the long run; half of it in the short one
    overrides   of the configuration, `key=value`
    """

    shape: str
    sizes: dict[str, Any]
    requests: int
    shortest: int
    longest: int
    batches: tuple[int, ...]
    stores: tuple[str, ...]
    new_tokens: int
    top_k: int
    candidates: str | int | float
    graph: bool
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"--shortest: got {self.shortest}, wanted 1 to the {self.longest} of --longest")
        if self.new_tokens < 4:
            raise ConfigError(f"--new-tokens: got {self.new_tokens}, wanted at least 4")
        if min(self.batches) < 2:
            raise ConfigError(
                f"--batch: got {min(self.batches)}, wanted at least 2: one after the other is measured too"
            )

    @property
    def num_rows(self) -> int:
        return len(self.batches) * len(self.stores)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        step = (self.longest - self.shortest) / max(1, self.requests - 1)
        lengths = [round(self.shortest + step * index) for index in range(self.requests)]
        random.Random(0).shuffle(lengths)
        return lengths

    @property
    def runtime(self) -> dict[str, Any]:
        """The section of pariskv's configuration."""
        return {"graph": "on" if self.graph else "off"}

    def config(self, store: str) -> Config:
        return bench_config(store, self.top_k, self.candidates, self.overrides, **self.runtime)


def bench_device(name: str) -> torch.device:
    """The device that auto, cuda or cpu names; raises ConfigError for another name, and without the GPU."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"--device: got {name!r}, wanted auto, cuda or cpu")
    if name == "cuda":
        require_cuda()
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Found:
    """Seconds of the long run, those of them that prompts were read in, and those of one step.

    rows  requests that get a token in a step, on average
    """

    seconds: float
    read_s: float
    step_s: float
    rows: float


def measure(settings: Settings, device: torch.device) -> Iterator[Row]:
    """The rows, one by one."""
    from pariskv.integrations.shapes import random_model

    model = random_model(settings.sizes, settings.shape, device, _dtype(device))
    alone: dict[str, Found | str] = {}
    for store in settings.stores:
        bench_pipeline(settings.config(store), device)  # what cannot be bound is refused before all else
    for store, batch in product(settings.stores, settings.batches):
        case = _Case(settings, model, store)
        if store not in alone:
            alone[store] = case.attempt(1)
        yield _row(settings, store, batch, case.attempt(batch), alone[store])


def _row(settings: Settings, store: str, batch: int, together: Found | str, alone: Found | str) -> Row:
    values: dict[str, Any] = {}
    tokens = settings.requests * settings.new_tokens
    sides = {"": together, "alone_": alone}
    for name, found in sides.items():
        if isinstance(found, Found):
            values |= {
                f"{name}seconds": found.seconds,
                f"{name}read_seconds": found.read_s,
                f"{name}tokens_per_s": tokens / found.seconds,
                f"{name}step_ms": 1e3 * found.step_s,
            }
    if isinstance(together, Found) and isinstance(alone, Found):
        values["ratio"] = alone.seconds / together.seconds
        values["step_ratio"] = alone.step_s * together.rows / together.step_s
    return make_row(
        "batching",
        "; ".join(found for found in sides.values() if isinstance(found, str)) or None,
        shape=settings.shape,
        requests=settings.requests,
        prompt_tokens=sum(settings.lengths),
        new_tokens=settings.new_tokens,
        batch=batch,
        store=store,
        **values,
    )


@dataclass(frozen=True)
class _Case:
    """One store."""

    settings: Settings
    model: LanguageModel
    store: str

    def attempt(self, rows: int) -> Found | str:
        """What `rows` requests at a time take, or why they cannot be answered."""
        try:
            found: Found | str = self._measure(rows)
        except TOO_LARGE as error:
            found = f"{self.store}, batch {rows}: {reason(error)}"
        release(self.model.device)
        return found

    def _measure(self, rows: int) -> Found:
        new = self.settings.new_tokens
        if self.model.device.type == "cuda":
            self._seconds(rows, new // 2)  # compiles the kernels
        short, short_read = self._seconds(rows, new // 2)
        long, long_read = self._seconds(rows, new)
        waves = -(-self.settings.requests // rows)
        step = (long - long_read - short + short_read) / (waves * (new - new // 2))
        return Found(long, long_read, step, self.settings.requests / waves)

    def _seconds(self, rows: int, new_tokens: int) -> tuple[float, float]:
        """Of answering every request, from token ids to the last new token on the host; and of reading the prompts."""
        asks, config = self._asks(new_tokens), self._config(new_tokens)
        batching = _Timed(self.model, lambda: self.model.new_cache(config), rows, config.generation, config.runtime)
        release(self.model.device)
        start = time.perf_counter()
        answers = list(batching.answers(asks))
        seconds = time.perf_counter() - start
        if failed := next((answer.error for answer in answers if answer.error), ""):
            raise CapacityError(failed)
        return seconds, batching.read_s

    def _asks(self, new_tokens: int) -> Sequence[Ask]:
        draw, vocabulary = random.Random(1), self.settings.sizes["vocab_size"]
        return [
            Ask([draw.randrange(vocabulary) for _ in range(length)], new_tokens) for length in self.settings.lengths
        ]

    def _config(self, new_tokens: int) -> Config:
        config = self.settings.config(self.store)
        return replace(config, generation=GenerationConfig(max_new_tokens=new_tokens))


class _Timed(Batching):
    """Batching that measures how long it reads, and takes no request out of a batch where there is no room for it."""

    read_s = 0.0

    def read(self, cache: ParisCache, batch: Batch, ask: Ask) -> Tensor:
        start = time.perf_counter()
        logits = super().read(cache, batch, ask)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.read_s += time.perf_counter() - start
        return logits

    def alone(self, asks: Sequence[Ask | None], index: int) -> Answer:
        if self.rows > 1:
            raise CapacityError(f"request {index} does not go into a batch of {self.rows}; the log says why")
        return super().alone(asks, index)
