"""`pariskv bench decode`: whole decode steps of a random model over a synthetic history, pariskv beside dense.

paris_step    one token through `pariskv.decode`, as `pariskv run` does it
dense_step    the same through transformers' static cache: `static.py`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from pariskv.bench.dense import time_dense
from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, refuse_layers, release
from pariskv.bench.static import dense_step
from pariskv.bench.synthetic import bench_config, bench_pipeline
from pariskv.bench.timing import Timer, copy_bandwidth
from pariskv.config import GenerationConfig, RuntimeConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.errors import CapacityError, ConfigError
from pariskv.filling import fill_layer
from pariskv.prompt import History
from pariskv.types import LayerInfo

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.transformers import ParisCache

Step = Callable[[], object]
"""One token for every row; returns once it is on the host."""

WARM_UP = 4
"""Steps before the measured ones: in them kernels compile and the step is captured."""

WARM_UP_PROMPT = 4096
"""Tokens of the prefill before the measured one, above `dense_below`."""


@dataclass(frozen=True)
class Settings:
    """What to measure: every combination of tokens, batch and store.

    sizes       of the model, as in `integrations.shapes`
    steps       measured steps; a multiple of the update interval has its updates in the mean
    prefill     read a real random prompt and measure the time to its first token, instead of filling the cache
    chunk       tokens of that prompt that go through the model at a time, None for all
    memory_cap  bytes of device memory that torch may use, None for all
    overrides   of the configuration, `key=value`
    """

    shape: str
    sizes: dict[str, Any]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    stores: tuple[str, ...]
    top_k: int
    candidates: str | int | float
    graph: bool
    compile: bool
    steps: int = 256
    prefill: bool = False
    chunk: int | None = None
    memory_cap: int | None = None
    dtype: torch.dtype = torch.bfloat16
    copy_size: int = 1 << 30  # bytes, to measure the bandwidth with
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.tokens) <= self.steps + WARM_UP:
            raise ConfigError(f"--steps: got {self.steps}, wanted fewer than the {min(self.tokens)} tokens of a row")

    @property
    def num_rows(self) -> int:
        return len(self.tokens) * len(self.batches) * len(self.stores)

    @property
    def runtime(self) -> dict[str, Any]:
        """The section of pariskv's configuration."""
        return {"graph": "on" if self.graph else "off", "compile": self.compile}

    @property
    def all_steps(self) -> int:
        return WARM_UP + self.steps


@dataclass
class Found:
    """What one side of a row took; None, with `why`, for what did not run. `history`: how our prompt was read."""

    ms: float | None = None
    ttft_s: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    history: History | None = None
    why: list[str] = field(default_factory=list)

    @contextmanager
    def attempt(self, what: str, device: torch.device) -> Iterator[None]:
        """Note where there is no room for what is tried here, and go on."""
        try:
            yield
        except TOO_LARGE as error:
            self.why.append(f"{what}: {reason(error)}")
        release(device)


def measure(settings: Settings, timer: Timer, measured: dict[str, Any]) -> Iterator[Row]:
    """The rows, one by one; a copy's bandwidth, which backend `dense` is and how a prompt was read go to `measured`."""
    from pariskv.integrations.shapes import random_model

    with memory_cap(settings.memory_cap):
        measured["copy_bytes_per_s"] = copy_bandwidth(timer, settings.copy_size)
        release(timer.device)
        model = random_model(settings.sizes, settings.shape, timer.device, settings.dtype)
        for tokens, batch in product(settings.tokens, settings.batches):
            case = _Case(settings, model, timer, tokens, batch)
            dense = case.dense(measured)
            for store in settings.stores:
                release(timer.device)  # while an error was being handled, what had failed was still held
                ours = case.paris(store)
                if ours.history is not None:
                    found = {"tokens": tokens, "batch": batch, "store": store, "history": ours.history}
                    measured.setdefault("prefill_history", []).append(found)
                yield _row(case, store, ours, dense)


def _row(case: _Case, store: str, ours: Found, dense: Found) -> Row:
    return make_row(
        "decode",
        "; ".join([*ours.why, *dense.why]) or None,
        shape=case.settings.shape,
        tokens=case.tokens,
        batch=case.batch,
        store=store,
        ms=ours.ms,
        tokens_per_s=1e3 * case.batch / ours.ms if ours.ms else None,
        dense_ms=dense.ms,
        dense_tokens_per_s=1e3 * case.batch / dense.ms if dense.ms else None,
        ratio=dense.ms / ours.ms if ours.ms and dense.ms else None,
        device_bytes=ours.device_bytes,
        host_bytes=ours.host_bytes,
        ttft_s=ours.ttft_s,
        dense_ttft_s=dense.ttft_s,
    )


@dataclass(frozen=True)
class _Case:
    """One length and batch."""

    settings: Settings
    model: LanguageModel
    timer: Timer
    tokens: int
    batch: int

    def dense(self, measured: dict[str, Any]) -> Found:
        found, device = Found(), self.model.device
        if self.settings.prefill:
            with found.attempt("dense prefill", device):
                found.ttft_s = self._dense_ttft()
        with found.attempt("dense", device):
            found.ms = self._dense_ms(measured)
        return found

    def _dense_ttft(self) -> float:
        seconds = 0.0
        for tokens in (WARM_UP_PROMPT, self.tokens):
            with self.model.dense() as cache:
                seconds = self._read(cache, tokens, 1)
        return seconds

    def _dense_ms(self, measured: dict[str, Any]) -> float:
        attention = time_dense(self.timer, self._info(), self.tokens)
        if attention.backend is None:
            raise CapacityError(attention.why)
        measured.setdefault("dense", []).append(
            {"tokens": self.tokens, "batch": self.batch, "backend": attention.backend, "us": attention.us}
        )
        s = self.settings
        steps = dense_step(self.model, self.batch, self.tokens, s.all_steps, attention.backend, s.graph, s.compile)
        with steps as step:
            return 1e3 * seconds_per_step(step, s.steps)

    def paris(self, store: str) -> Found:
        found = Found()
        with found.attempt(store, self.model.device):
            self._paris(store, found)
        torch.compiler.reset()  # what was compiled for this length and batch serves no other
        return found

    def _paris(self, store: str, found: Found) -> None:
        s, device = self.settings, self.model.device
        config = bench_config(store, s.top_k, s.candidates, s.overrides, **s.runtime)
        refuse_layers(
            self._info(),
            *bench_pipeline(config, device),
            self.tokens,
            self.model.model.config.num_hidden_layers,
            in_host=store != "resident",
        )
        new_tokens = s.all_steps + 1
        if s.prefill:
            self._read(self.model.new_cache(config), WARM_UP_PROMPT, new_tokens)
            release(device)
        cache = self.model.new_cache(config)
        cache.warm_up()
        if s.prefill:
            found.ttft_s = self._read(cache, self.tokens, new_tokens)
            found.history = cache.request.prefill_history
        else:
            fill_cache(cache, self.batch, self.tokens, new_tokens)
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step = paris_step(self.model, cache, self.batch, self.tokens, new_tokens, config.runtime)
        found.ms = 1e3 * seconds_per_step(step, s.steps)
        found.device_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        found.host_bytes = cache.request.kv_host_bytes

    def _read(self, cache: Any, tokens: int, new_tokens: int) -> float:
        """Seconds from random token ids on the device to the first new token on the host."""
        device, vocabulary = self.model.device, self.model.model.config.vocab_size
        prompt = Batch(torch.randint(0, vocabulary, (self.batch, tokens), device=device))
        prompt.tokens.sum().item()  # waits until they are there
        start = time.perf_counter()
        prefill(self.model, cache, prompt, new_tokens, self.settings.chunk).argmax(dim=-1).tolist()
        return time.perf_counter() - start

    def _info(self) -> LayerInfo:
        c = self.model.model.config
        group, dim = c.num_attention_heads // c.num_key_value_heads, c.head_dim
        return LayerInfo(
            0, self.batch, c.num_key_value_heads, group, dim, self.settings.dtype, self.timer.device, dim**-0.5
        )


def fill_cache(cache: ParisCache, batch: int, tokens: int, new_tokens: int) -> None:
    """Random keys and values instead of a prefill of `tokens` tokens a row, layer after layer."""
    cache.begin_prefill(tokens, new_tokens)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.state = cache.request.layer(cache.geometry.expected_info(layer.index, batch))
        layer.is_initialized = True
        layer.columns = tokens
        fill_layer(layer.state, tokens)
    cache.request.request.prefilling = False


def paris_step(
    model: LanguageModel, cache: ParisCache, batch: int, tokens: int, new_tokens: int, runtime: RuntimeConfig
) -> Step:
    """A function that decodes one token for every row of a filled cache, `new_tokens` times at most."""
    prompt = Batch(torch.zeros(batch, tokens, dtype=torch.int64, device=model.device))
    logits = torch.zeros(batch, model.model.config.vocab_size, dtype=model.model.dtype, device=model.device)
    steps = decode(model, cache, prompt, logits, GenerationConfig(max_new_tokens=new_tokens), runtime)
    return lambda: next(steps)


def seconds_per_step(step: Step, steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The mean time of `steps` steps, whatever happens between them included, after WARM_UP others."""
    for _ in range(WARM_UP):
        step()
    start = clock()
    for _ in range(steps):
        step()
    return (clock() - start) / steps


@contextmanager
def memory_cap(limit: int | None) -> Iterator[None]:
    """Let torch use this much of the device's memory and no more, by its per-process limit."""
    if limit is None:
        yield
        return
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if limit > total:
        raise ConfigError(f"--memory-cap: got {limit / 1e9:.0f} GB, the device has {total / 1e9:.0f} GB")
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
