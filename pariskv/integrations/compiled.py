"""The decode step's forward under `torch.compile`: our layers are one opaque operation each.

What a layer does to its cache is not traced. The traced model sees a `StepCache`, which hands keys and values
through, and `pariskv::layer`, which finds the layer of the cache that `running` names at the time of the call: so
the compiled code belongs to the model and serves every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from pariskv.integrations.transformers import ParisCache

_running: list[ParisCache] = []


@contextmanager
def running(cache: ParisCache) -> Iterator[None]:
    """The cache whose layers `pariskv::layer` works on, for the calls inside."""
    _running.append(cache)
    try:
        yield
    finally:
        _running.pop()


def is_running() -> bool:
    """A step of ours is being traced, and not somebody's compiled model with another cache."""
    return len(_running) > 0  # torch 2.11 cannot trace bool() of a list


@torch.library.custom_op("pariskv::layer", mutates_args=())
def layer_step(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, index: int, scaling: float) -> Tensor:
    """One layer of one step: queries [B, H * G, 1, D], new keys and values [B, H, 1, D] to [B, H * G, 1, D]."""
    layer: Any = _running[-1].layers[index]
    layer.update(keys, values)
    attended: Tensor = layer.attend(query, keys, values, None, scaling, sinks)
    return attended.contiguous()


@layer_step.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, index: int, scaling: float) -> Tensor:
    return query.new_empty(query.shape)


class StepCache(Cache):
    """What the traced model takes for its cache: holds nothing."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[ThroughLayer() for _ in range(num_layers)])


class ThroughLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers has no types here
    """Holds nothing: the tokens that a model gives it are all that there are."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to make."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class CompiledForward:
    """A model's forward of one token a row, compiled at its first call for a batch size."""

    def __init__(self, model: Any, backend: str = "inductor"):
        self.cache = StepCache(int(model.config.get_text_config(decoder=True).num_hidden_layers))
        self.forward: Any = torch.compile(model.forward, dynamic=False, fullgraph=True, backend=backend)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: ParisCache) -> Tensor:
        """Logits [B, V] of tokens [B, 1] at positions [B, 1]."""
        with running(cache):
            out = self.forward(
                input_ids=tokens, position_ids=positions, cache=self.cache, use_cache=True, logits_to_keep=1
            )
        logits: Tensor = out.logits[:, -1]
        return logits
