"""What a model's forward has alive beside its weights and its cache: read off a meter, on torch's device "meta".

A model without weights is run over a chunk of tokens whose tensors have shapes and no memory; attention is left out,
since `pariskv.planner` adds it for the device that the request will run on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs

from pariskv.attention import dense_attention
from pariskv.integrations.compiled import ThroughLayer
from pariskv.integrations.hub import one_line
from pariskv.integrations.transformers import paris_mask, use_attention
from pariskv.meter import Meter, tensor_bytes
from pariskv.planner import Trace
from pariskv.prompt import without_the_rest

logger = logging.getLogger(__name__)

TRACED = "pariskv_traced"
"""The name in transformers' attention interface of an attention that only has a result."""

TOKENS = (512, 1024, 2048)
"""Chunks that are traced; the parabola through their bytes gives any other (a sliding window's mask is a square)."""

META = torch.device("meta")


class Activations:
    """The traces of a model's forward by batch and chunk; implements `pariskv.planner.Forward`."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        config = model.config.get_text_config(decoder=True)
        self._window = int(getattr(config, "sliding_window", None) or 0)
        self._logits = int(config.vocab_size) * model.dtype.itemsize
        self._traced: dict[tuple[int, int, bool], Trace] = {}

    def at(self, batch: int, tokens: int, chunked: bool) -> Trace:
        """The trace of a chunk of `tokens` tokens in each of `batch` rows.

        chunked  keys and values are copied to where the cache has them, instead of kept as they are
        """
        points = [self._trace(1, size, chunked).values for size in TOKENS]
        rows = self._trace(2, TOKENS[0], chunked).values
        found = []
        for *values, two in zip(*points, rows, strict=True):
            growth = min(2.0, max(1.0, two / values[0])) if values[0] else 1.0
            found.append(round(_parabola(values, tokens) * (1 + (batch - 1) * (growth - 1))))
        layers = len(found) // 2
        return Trace(found[:layers], found[layers:-1], found[-1])

    def logits(self, batch: int) -> int:
        """Bytes of the logits of one token a row."""
        return batch * self._logits

    def stock(self, batch: int, tokens: int) -> int:
        """Keys and values that layers with a sliding window hold of `tokens` tokens a row while decoding."""
        few = min(8, self._window)
        return 0 if not few else traced_stock(self._model, few) // few * min(tokens, self._window) * batch

    def _trace(self, batch: int, tokens: int, chunked: bool) -> Trace:
        key = batch, tokens, chunked
        if key not in self._traced:
            self._traced[key] = trace_chunk(self._model, batch, tokens, chunked)
        return self._traced[key]


def _parabola(values: Sequence[int], tokens: int) -> float:
    """The parabola through the values at `TOKENS`, without a part that falls."""
    (a, b, c), (x, y, z) = TOKENS, values
    first, second = (y - x) / (b - a), (z - y) / (c - b)
    square = max(0.0, (second - first) / (c - a))
    slope = max(0.0, first - square * (a + b))
    return max(0.0, x + slope * (tokens - a) + square * (tokens**2 - a**2))


def trace_chunk(model: PreTrainedModel, batch: int, tokens: int, chunked: bool) -> Trace:
    """Run a model on the device "meta" over one chunk, and read the meter at every attention."""
    with Meter() as meter:
        cache = _run(model, batch, tokens, chunked, meter)
        after = meter.peak - cache.kept
    return Trace(cache.before, cache.at, max(0, after))


def traced_stock(model: PreTrainedModel, tokens: int) -> int:
    """Bytes that the layers without full attention keep of `tokens` tokens."""
    with Meter() as meter:
        return _run(model, 1, tokens, False, meter).stock_bytes


@torch.no_grad()
def _run(model: PreTrainedModel, batch: int, tokens: int, chunked: bool, meter: Meter) -> _TracedCache:
    cache = _TracedCache(model, meter, chunked)
    AttentionInterface.register(TRACED, cache.attend)
    AttentionMaskInterface.register(TRACED, paris_mask)
    use_attention(model, TRACED)
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=META)
    positions = torch.arange(tokens, device=META).expand(batch, -1)
    cast(Any, model)(
        input_ids=ids, position_ids=positions, attention_mask=None, cache=cache, use_cache=True, logits_to_keep=1
    )
    return cache


class _TracedCache(Cache):
    """Keeps what its layers are given, and notes what is alive beside it."""

    def __init__(self, model: PreTrainedModel, meter: Meter, chunked: bool):
        kinds, kwargs = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
        self.meter, self.chunked, self.kept = meter, chunked, 0
        self.before: list[int] = []
        self.at: list[int] = []
        super().__init__(
            layers=[
                _TracedLayer(self) if kind == "full_attention" else DYNAMIC_LAYER_TYPE_MAPPING[kind](**more)
                for kind, more in zip(kinds, kwargs, strict=True)
            ]
        )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float = 1.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        if isinstance(self.layers[cast(int, module.layer_idx)], _TracedLayer):
            self.before.append(self.meter.peak - self.kept)
            self.at.append(self.meter.live - self.kept)
            self.meter.restart()
        elif softcap is not None or sinks is not None:
            return dense_attention(query, key, value, attention_mask, scaling, softcap, sinks).transpose(1, 2), None
        elif attention_mask is not None:
            torch.empty_like(attention_mask, dtype=query.dtype)  # a fused kernel takes the flags as numbers
        return torch.empty_like(query).transpose(1, 2), None

    @property
    def stock_bytes(self) -> int:
        stock = [layer for layer in self.layers if not isinstance(layer, _TracedLayer)]
        return tensor_bytes(
            tensor
            for layer in stock
            for name in ("keys", "values")
            if isinstance(tensor := getattr(layer, name, None), Tensor)
        )


class _TracedLayer(ThroughLayer):  # type: ignore[no-untyped-call]  # transformers has no types here
    def __init__(self, cache: _TracedCache):
        super().__init__()
        self.cache = cache
        self.held: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.cache.chunked:
            # Views of a buffer that is counted elsewhere.
            room = torch.empty(0, dtype=key_states.dtype, device=META)
            self.held = room, room
            return room.expand_as(room), room
        kept = without_the_rest(key_states), without_the_rest(value_states)
        self.held = kept
        self.cache.kept += kept[0].nbytes + kept[1].nbytes
        return kept


def activations_of(model: PreTrainedModel) -> Activations | None:
    """The traces of a loaded model's forward; see `traced`."""
    return traced(meta_model(model.config, model.dtype, type(model)))


def traced(model: PreTrainedModel) -> Activations | None:
    """The traces of a model on the device "meta"; None, with a warning, where it cannot run without numbers."""
    found = Activations(model)
    try:
        found.at(1, 1, False)
    except Exception as error:  # whatever a model's own code raises for a tensor without numbers
        logger.warning(
            "the memory of %s's activations is not counted: it cannot be traced (%s)",
            type(model).__name__,
            one_line(error),
        )
        return None
    return found


def meta_model(config: PreTrainedConfig, dtype: torch.dtype, model_class: type[PreTrainedModel] | None = None) -> Any:
    """A model of that configuration whose weights have shapes and no memory.

    model_class  None: the class that transformers has for the configuration's causal language model
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    automatic: Any = AutoModelForCausalLM if model_class is None else None
    with META:
        if automatic is not None:
            return automatic.from_config(config, dtype=dtype).eval()
        return cast(Any, model_class)._from_config(config, dtype=dtype).eval()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights and buffers, tied ones once."""
    return tensor_bytes([*model.parameters(), *model.buffers()])
