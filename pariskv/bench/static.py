"""The dense baseline's decode step: transformers' static cache, compiled and captured as pariskv's step is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import sdpa_kernel

from pariskv.bench.dense import BACKENDS
from pariskv.bench.timing import CUDA

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel


@contextmanager
def dense_step(
    model: LanguageModel, batch: int, tokens: int, steps: int, backend: str, graph: bool, compile: bool
) -> Iterator[Callable[[], object]]:
    """A function that decodes one token for every row and has it on the host, `steps` times at most.

    Every step attends to exactly `tokens` rows; the steps write into the last of them.
    backend  of `BACKENDS`
    """
    from pariskv.integrations.shapes import dense_without_mask, rewind, static_cache

    cache = static_cache(model.model, batch, tokens)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    positions = torch.zeros_like(ids)
    forward = torch.compile(model.model.forward, dynamic=False) if compile else model.model.forward

    def step() -> None:
        out = forward(input_ids=ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        ids.copy_(out.logits[:, -1].argmax(dim=-1, keepdim=True))
        positions.add_(1)

    def begin() -> None:
        rewind(cache, tokens - steps)
        positions.fill_(tokens - steps)

    with torch.no_grad(), sdpa_kernel(BACKENDS[backend]), dense_without_mask(model.model):
        begin()
        run = _captured(step) if graph else step
        begin()

        def call() -> object:
            run()
            return ids.tolist()

        try:
            yield call
        finally:
            # What was compiled for this length and batch serves no other.
            torch.compiler.reset()


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step in a CUDA graph, after two on a side stream, in which it is compiled."""
    stream = CUDA.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
