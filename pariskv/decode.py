"""START READING HERE: a prompt goes in, tokens come out.

    prefill       the prompt through the model, chunk by chunk, with dense attention
    make_steps    eager steps, or one that is captured in a CUDA graph and replayed (`pariskv.graph`)
    decode_step   one token through the model; in each layer the five hooks:
    attend_layer      encode_query -> coarse_select -> rerank -> fetch -> attend
    generate      prefill, then sample and step until every row has ended

The model calls `attend_layer` from inside its own forward (`pariskv.integrations.transformers`);
the fifth hook, `update` (with `encode`), runs between steps: `LayerState.settle`.
A step has fixed shapes, pads with -1 and reads lengths from the device, so that it can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from pariskv.beside import Beside
from pariskv.config import GenerationConfig, RuntimeConfig
from pariskv.errors import ModelError, noted
from pariskv.graph import CapturableCache, CapturedSteps, capture_reason, log_fallback
from pariskv.layer import LayerState
from pariskv.sampling import NOT_FINITE, Sampler
from pariskv.types import Query, Tensors

DEFAULT_RUNTIME = RuntimeConfig()

READING = "while reading the prompt"

Progress = Callable[[int, int], None]
"""Called with (tokens read, tokens in all) after every chunk of a prefill."""


class DecodeCache(Protocol):
    """What the loop asks of a cache; `ParisCache` is one, a plain dense cache another."""

    def begin_prefill(self, prompt_tokens: int, new_tokens: int) -> None: ...

    def end_prefill(self) -> None: ...

    def set_active(self, active_rows: list[bool]) -> None: ...

    def end_step(self) -> None: ...


class Model(Protocol):
    """What the loop asks of a language model."""

    eos_ids: tuple[int, ...]
    pad_id: int

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: DecodeCache) -> Tensor:
        """Logits [B, V] of the last of the tokens [B, Q]; mask bool [B, n] over everything so far."""
        ...

    def forward_step(self, tokens: Tensor, positions: Tensor, cache: DecodeCache, compile: bool) -> Tensor:
        """`forward` of one token a row [B, 1], with nothing that a CUDA graph cannot hold; compiled if asked."""
        ...


@dataclass
class Batch:
    """Prompts of one batch, padded on the left.

    tokens  int64 [B, T]
    mask    bool [B, T], None where nothing is padded
    seeds   one a row for what is drawn; None: the settings' seed in every row
    """

    tokens: Tensor
    mask: Tensor | None = None
    seeds: Sequence[int] | None = None

    def positions(self) -> Tensor:
        """[B, T], counted from each row's first real token."""
        if self.mask is None:
            return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        return (self.mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def generate(
    model: Model,
    cache: DecodeCache,
    batch: Batch,
    settings: GenerationConfig,
    chunk: int | None = None,
    progress: Progress | None = None,
    runtime: RuntimeConfig = DEFAULT_RUNTIME,
) -> Iterator[list[int | None]]:
    """Yield each step's new token per row, None once a row has ended.

    chunk    tokens of the prompt that go through the model at a time, None for all of them
    runtime  whether steps are captured in a CUDA graph, and compiled before
    """
    logits = prefill(model, cache, batch, settings.max_new_tokens, chunk, progress)
    yield from decode(model, cache, batch, logits, settings, runtime)


@torch.no_grad()
def prefill(
    model: Model,
    cache: DecodeCache,
    batch: Batch,
    new_tokens: int,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Read the prompts into the cache; returns the logits [B, V] after their last tokens."""
    total = batch.tokens.shape[1]
    positions = batch.positions()
    cache.begin_prefill(total, new_tokens)
    logits = torch.empty(0)
    for start in range(0, total, chunk or total):
        stop = min(start + (chunk or total), total)
        mask = None if batch.mask is None else batch.mask[:, :stop]
        with noted(READING):
            logits = model.forward(batch.tokens[:, start:stop], positions[:, start:stop], mask, cache)
        if progress is not None:
            progress(stop, total)
    refuse_prompt_logits(logits)
    with noted(READING):
        cache.end_prefill()
    return logits


@torch.no_grad()
def decode(
    model: Model,
    cache: DecodeCache,
    batch: Batch,
    logits: Tensor,
    settings: GenerationConfig,
    runtime: RuntimeConfig = DEFAULT_RUNTIME,
) -> Iterator[list[int | None]]:
    """Sample from the prefill's logits and go on until every row has ended or the tokens are used up."""
    sampler = Sampler(settings, logits.shape[0], batch.seeds)
    run = make_steps(model, cache, batch, sampler, runtime, logits.device)
    active = [True] * logits.shape[0]
    sampled = sampler(logits)
    for step in range(settings.max_new_tokens):
        tokens = [token if is_active else None for token, is_active in zip(sampled.tolist(), active, strict=True)]
        refuse_not_finite([token != NOT_FINITE for token in tokens], f"decode step {step}")
        yield tokens
        active = [token is not None and token not in model.eos_ids for token in tokens]
        if not any(active) or step + 1 == settings.max_new_tokens:
            return
        cache.set_active(active)
        step_tokens = sampled if all(active) else sampled.where(torch.tensor(active).to(sampled.device), model.pad_id)
        with noted(f"at decode step {step + 1}"):
            sampled = run.step(step_tokens.unsqueeze(1))


def refuse_not_finite(is_finite: Sequence[bool], where: str) -> None:
    """Raise ModelError for the first row of which that is not so: its logits were NaN or infinite."""
    if not all(is_finite):
        raise ModelError(
            f"row {list(is_finite).index(False)}: the logits after {where} are NaN or infinite, so no token can be "
            f"chosen; look for such values in the weights or the prompt's keys, or use model.dtype=bfloat16 or float32 "
            f"where float16 overflows"
        )


def refuse_prompt_logits(logits: Tensor) -> None:
    """`refuse_not_finite` of logits [B, V] after a prompt: before formats learn from its keys, which are no better."""
    refuse_not_finite(logits.amax(dim=-1).isfinite().tolist(), "the prompt")


class Stepper(Protocol):
    """How decode steps run."""

    def place(self, row: int, tokens: int, columns: int) -> None:
        """The row has been given to another request: it holds `tokens` tokens, and the cache `columns` columns."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """One step over tokens [B, 1]: the next tokens [B]."""
        ...


def make_steps(
    model: Model, cache: DecodeCache, batch: Batch, sampler: Sampler, runtime: RuntimeConfig, device: torch.device
) -> Stepper:
    """Captured steps (`pariskv.graph`) where `runtime` wants them and they are possible, else eager ones."""
    if reason := capture_reason(runtime, cache, device):
        log_fallback(runtime, reason, device)
        return EagerSteps(model, cache, batch, sampler)
    forward = functools.partial(model.forward_step, cache=cache, compile=runtime.compile)
    return CapturedSteps(forward, cast(CapturableCache, cache), batch.positions()[:, -1:] + 1, sampler)


class EagerSteps:
    """Steps launched operation by operation: a CPU, or what cannot be captured."""

    def __init__(self, model: Model, cache: DecodeCache, batch: Batch, sampler: Sampler):
        self.model, self.cache, self.sampler = model, cache, sampler
        self.positions = batch.positions()[:, -1:] + 1
        self.mask = batch.mask

    def place(self, row: int, tokens: int, columns: int) -> None:
        self.positions[row] = tokens
        if self.mask is not None:
            missing = columns - self.mask.shape[1]
            self.mask = torch.nn.functional.pad(self.mask, (missing, 0), value=False)
            self.mask[row] = torch.arange(columns, device=self.mask.device) >= columns - tokens

    def step(self, tokens: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        logits = decode_step(self.model, self.cache, tokens, self.positions, self.mask)
        self.positions = self.positions + 1
        return self.sampler(logits)


@torch.no_grad()
def decode_step(model: Model, cache: DecodeCache, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """One token per row [B, 1] through the model, then what is due moves into the zone; logits [B, V]."""
    logits = model.forward(tokens, positions, mask, cache)
    cache.end_step()
    return logits


@torch.inference_mode()
def attend_layer(layer: LayerState, heads: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of one decode step: what the queries [B, H, G, D] find in the history.

    The step's own key and value are in the ring already.
    returns out [B, H, G, D] and its log-sum-exp [B, H, G]
    """
    pipeline, info, device = layer.pipeline, layer.info, layer.device
    assert device is not None

    plain = Query(heads, None, info.scaling, info.softcap)
    layer.chosen = None
    if not layer.retrieves:
        return pipeline.attend(plain, device.working, None)
    assert pipeline.coarse_select is not None
    assert pipeline.fetch is not None
    assert layer.store is not None
    if pipeline.reads_steady:
        steady = Beside(info.device, lambda: pipeline.attend(plain, device.working, None)[1])
    encoded = encode_queries(layer, heads)

    def query(stage: str, producer: str | None) -> Query:
        log_sum = steady.result() if stage in pipeline.reads_steady else None
        return replace(plain, encoded=encoded.get(producer), steady=log_sum)

    codes = layer.zone.codes_of(pipeline.coarse_codes)
    selection = pipeline.coarse_select(query("coarse_select", pipeline.coarse_codes), codes, layer.budget)
    if pipeline.rerank is not None:
        codes = layer.zone.codes_of(pipeline.rerank_codes)
        selection = pipeline.rerank(query("rerank", pipeline.rerank_codes), selection, codes, pipeline.top_k)
    slots = device.working.slots[:, :, : selection.indices.shape[-1]]
    selected = pipeline.fetch(selection, layer.store, slots)
    layer.chosen = selected.valid
    return pipeline.attend(plain, device.working, selected)


def encode_queries(layer: LayerState, heads: Tensor) -> dict[str | None, Tensors]:
    """The encoded queries by producer, once for each format that a stage of the layer reads."""
    read = {layer.pipeline.coarse_codes, layer.pipeline.rerank_codes}
    return {
        encoder.name: encoder.encode_query(heads, layer.zone.state_of(encoder.name))
        for encoder in layer.pipeline.encoders
        if encoder.encode_query is not None and encoder.name in read
    }
