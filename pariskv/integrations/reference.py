"""A dense pass over a prompt and the steps after it, once: every layer's queries, keys and values, and the logits.

What retrievers are compared on: each is given what this pass saw, so the model reads the prompt only once.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from pariskv.cache import as_heads
from pariskv.decode import Batch, Progress, decode_step, prefill
from pariskv.integrations.geometry import full_attention_layers
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.paris_layer import ATTENTION, ParisLayer
from pariskv.integrations.transformers import (
    DenseCache,
    ParisCache,
    paris_attention,
    paris_mask,
    use_attention,
)
from pariskv.replay import Clock, LayerTrace

RECORDING = "pariskv-recording"
"""The dense pass's name in transformers' attention and mask interfaces."""


@dataclass(frozen=True)
class Reference:
    """What a dense pass saw: n tokens of a prompt at once, then T steps.

    prompt  [1, n]
    tokens  [1, T]  what the steps read
    logits  [T, V]  what they answered
    layers          the layers with full attention, by index
    stock           the other layers' caches (sliding windows), as the prompt left them
    """

    prompt: Tensor
    tokens: Tensor
    logits: Tensor
    layers: Mapping[int, LayerTrace]
    stock: Mapping[int, Any]

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.shape[1]

    @property
    def steps(self) -> int:
        return self.tokens.shape[1]

    @torch.no_grad()
    def fill(self, cache: ParisCache) -> Iterator[float]:
        """Let a new cache read the prompt, without the model; the seconds that each layer took, then those of the end.

        They are what a retriever adds to a prefill: `encode`, `fit` and `update` of the whole prompt, and the dense
        part's rows.
        """
        clock = Clock(self.prompt.device)
        cache.begin_prefill(self.prompt_tokens, self.steps)
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, ParisLayer):
                cache.layers[index] = copy.deepcopy(self.stock[index])
                continue
            layer.state = cache.request.layer(cache.geometry.expected_info(index, 1))
            layer.is_initialized = True
            layer.columns = self.prompt_tokens
            keys, values, queries = self.layers[index].prompt()
            with clock.running():
                layer.state.append(keys, values)
                layer.state.chunk_attended(queries, None)
            yield clock.seconds[-1]
        with clock.running():
            cache.end_prefill()
        yield clock.seconds[-1]


@torch.no_grad()
def read_densely(
    model: LanguageModel,
    prompt: Tensor,
    question: Tensor,
    steps: int,
    chunk: int | None = None,
    keep_queries: bool = False,
    progress: Progress | None = None,
) -> Reference:
    """Read the prompt [1, n] at once, the question [1, Q] token by token, then `steps` tokens of the greedy answer.

    The answer does not end at an end-of-text token. keep_queries: the prompt's, too, which take as much as its keys
    times the group.
    """
    full = full_attention_layers(model.model)
    recorder = _Recorder(full, keep_queries)
    read: list[Tensor] = []
    answers: list[Tensor] = []
    with _recording(model, recorder) as cache:
        logits = prefill(model, cache, Batch(prompt), steps, chunk, progress)
        recorder.end_prompt()
        stock = {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if index not in full}
        position = torch.tensor([[prompt.shape[1]]], device=prompt.device)
        for step in range(question.shape[1] + steps):
            token = question[:, step : step + 1] if step < question.shape[1] else logits.argmax(-1, keepdim=True)
            logits = decode_step(model, cache, token, position + step, None)
            read.append(token)
            answers.append(logits)
        layers = {index: recorder.trace(index, cache, prompt.shape[1]) for index in full}
    return Reference(prompt, torch.cat(read, 1), torch.cat(answers), layers, stock)


@contextmanager
def _recording(model: LanguageModel, recorder: _Recorder) -> Iterator[DenseCache]:
    AttentionInterface.register(RECORDING, recorder.attend)
    AttentionMaskInterface.register(RECORDING, paris_mask)
    use_attention(model.model, RECORDING)
    try:
        yield DenseCache(config=model.model.config)
    finally:
        use_attention(model.model, ATTENTION)
        AttentionInterface.register(RECORDING, paris_attention)  # lets go of what was recorded


@dataclass
class _Recorder:
    """An attention function that is dense, and keeps the queries of the given layers."""

    layers: Collection[int]
    keep_prompt: bool
    is_prompt: bool = True
    prompt: dict[int, list[Tensor]] = field(default_factory=dict)
    steps: dict[int, list[Tensor]] = field(default_factory=dict)

    def attend(self, module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in self.layers and (self.keep_prompt or not self.is_prompt):
            (self.prompt if self.is_prompt else self.steps).setdefault(index, []).append(query)
        return paris_attention(module, query, *args, **kwargs)

    def end_prompt(self) -> None:
        self.is_prompt = False

    def trace(self, index: int, cache: DenseCache, prompt_tokens: int) -> LayerTrace:
        layer: Any = cache.layers[index]
        kv_heads = layer.keys.shape[1]
        heads = torch.stack([as_heads(query, kv_heads) for query in self.steps[index]])
        queries = torch.cat(self.prompt[index], dim=2) if self.keep_prompt else None
        return LayerTrace(prompt_tokens, layer.keys, layer.values, heads, queries)
