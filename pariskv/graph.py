"""One decode step captured in a CUDA graph, then replayed: the kernels of a step without their launches.

What a graph bakes in is everything that the host decided while it was captured: shapes, addresses, which
stages run. `RequestState.shape` names those decisions; when it changes (the first zone, a store or a ring
that grew), the next step runs eagerly and the one after it is captured anew. Lengths, budgets and positions
are read from the device, so they change freely; `update` runs between replays.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from pariskv.beside import rejoin
from pariskv.config import RuntimeConfig
from pariskv.errors import ConfigError
from pariskv.sampling import Sampler

logger = logging.getLogger(__name__)


class CapturableCache(Protocol):
    """What a captured step asks of a cache, beyond what the loop asks."""

    def graph_reason(self) -> str:
        """Why a step over this cache cannot be captured; empty where it can."""
        ...

    def shape(self) -> object:
        """What a captured step has baked in; compared before every replay."""
        ...

    def count_step(self) -> None:
        """The host's part of a step that was replayed."""
        ...

    def end_step(self) -> None:
        """Between two steps: what is due moves into the zone."""
        ...


class Forward(Protocol):
    """The model's forward over the step's tokens [B, 1] and positions [B, 1]: logits [B, V]."""

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor: ...


class CapturedSteps:
    """Decode steps replayed from a CUDA graph: the model's forward, the choice of the next token, the positions.

    positions  [B, 1] of the first step
    captures   how often a step was captured
    """

    def __init__(self, forward: Forward, cache: CapturableCache, positions: Tensor, sampler: Sampler):
        self.forward, self.cache, self.sampler = forward, cache, sampler
        self.captures = 0
        # What the graph reads and writes; overwritten by the next step.
        self.tokens, self.positions = torch.zeros_like(positions), positions.clone()
        self.draws = torch.zeros(len(positions), dtype=torch.float64, device=positions.device)
        self.logits = self.next_tokens = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape: object = None

    def place(self, row: int, tokens: int, columns: int) -> None:
        """The row has been given to another request, which holds `tokens` tokens."""
        self.positions[row] = tokens

    def step(self, tokens: Tensor) -> Tensor:
        """One step over tokens [B, 1]: the next tokens [B]."""
        self.tokens.copy_(tokens)
        if self.sampler.temperature > 0:
            self.draws.copy_(self.sampler.draws())
        shape = self.cache.shape()
        if shape != self._shape:
            # Eager once: what compiles or allocates at its first call does so outside of a capture.
            self._graph, self._shape = None, shape
            self._run()
        elif self._graph is None:
            self._capture().replay()
        else:
            self._graph.replay()
            self.cache.count_step()  # while the device works
        self.cache.end_step()
        return self.next_tokens

    def _run(self) -> None:
        self.logits = self.forward(self.tokens, self.positions)
        self.next_tokens = self.sampler.choose(self.logits, self.draws)
        self.positions += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record a step; the host's part of it has happened then, the device's has not."""
        graph = torch.cuda.CUDAGraph()
        # In memory of its own: into that of a graph that is gone torch captures nothing while a tensor there is alive.
        with torch.cuda.graph(graph):
            try:
                self._run()
            except BaseException:
                # CUDA refuses a capture whose branches have not met, and torch would not get out of it.
                rejoin(self.positions.device)
                raise
        self._graph = graph
        self.captures += 1
        return graph


def capture_reason(runtime: RuntimeConfig, cache: object, device: torch.device) -> str:
    """Why steps run eagerly under this `runtime`; empty where they are captured.

    Raises ConfigError with the reason where `graph: on` or `compile: true` want them captured.
    """
    reason = _reason(runtime, cache, device)
    if reason and runtime.graph == "on":
        raise ConfigError(f"runtime.graph=on: {reason}; use auto or off")
    if reason and runtime.compile:
        raise ConfigError(f"runtime.compile=true is for captured steps: {reason}; use runtime.compile=false")
    return reason


def log_fallback(runtime: RuntimeConfig, reason: str, device: torch.device) -> None:
    """Say why steps run eagerly: aloud where `auto` could not do on a GPU what it is for."""
    is_fallback = runtime.graph == "auto" and device.type == "cuda"
    logger.log(logging.WARNING if is_fallback else logging.INFO, "decode steps run eagerly: %s", reason)


def _reason(runtime: RuntimeConfig, cache: object, device: torch.device) -> str:
    if runtime.graph == "off":
        return "runtime.graph is off"
    if device.type != "cuda":
        return f"the model is on the {device.type}, and graphs are CUDA's"
    if not hasattr(cache, "graph_reason"):
        return f"a {type(cache).__name__} grows by concatenation"
    return str(cache.graph_reason())
