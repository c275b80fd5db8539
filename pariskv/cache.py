"""The state of one request: every layer's `LayerState`, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pariskv.binding import LayerPipeline
from pariskv.config import WindowConfig
from pariskv.counting import count_selected
from pariskv.fork import refuse_fork
from pariskv.layer import LayerState
from pariskv.lineage import SPARE, Lineage, moves
from pariskv.prompt import History
from pariskv.request import HEADROOM, ChooseHistory, Request
from pariskv.types import LayerInfo, Rotary
from pariskv.window import Window

LAYERS_PER_STEP = 2
"""Layers that move what is due in the same step: so few that the host is done before the device is."""


class RequestState:
    """The layers of one request, created as the model first reaches them.

    pipelines  layer index -> bound stages, for the layers that retrieve
    choose     decides how a prompt is read
    moments    query moments of the model's calibration, by layer
    """

    def __init__(
        self,
        pipelines: Mapping[int, LayerPipeline],
        window: WindowConfig,
        rotary: Rotary | None = None,
        choose: ChooseHistory | None = None,
        moments: Mapping[int, Tensor] | None = None,
    ):
        self.pipelines = dict(pipelines)
        self.request = Request(rotary=rotary, moments=moments or {}, choose=choose)
        self.layers: dict[int, LayerState] = {}
        self._window = window
        self._lineage = Lineage()
        self._spare: dict[int, LayerState] = {}  # a row beside the others, while rows change places

    def layer(self, info: LayerInfo) -> LayerState:
        """The state of layer `info.index`, made at its first call."""
        if info.index not in self.layers:
            self.layers[info.index] = self._new_layer(info)
        return self.layers[info.index]

    def _new_layer(self, info: LayerInfo) -> LayerState:
        pipeline = self.pipelines[info.index]
        return LayerState(info, pipeline, window_of(pipeline, self._window, info.index), self.request)

    # The phases, told by the loop; under `generate()` each layer infers them

    def begin_prefill(self, prompt_tokens: int, new_tokens: int = HEADROOM) -> None:
        """A prompt of `prompt_tokens` columns comes, then up to `new_tokens` tokens."""
        self.request.prompt_tokens = prompt_tokens
        self.request.new_tokens = new_tokens
        self.request.prefilling = True

    def end_prefill(self) -> None:
        """The prompt is complete: regions are made, formats are fitted, the prompt's buffers released."""
        self.request.prefilling = False
        for layer in self.layers.values():
            layer.end_prefill()

    def set_active(self, active_rows: list[bool]) -> None:
        """Rows that have ended stop writing."""
        for layer in self.layers.values():
            layer.set_active(active_rows)

    def reset(self) -> None:
        """Forget the request; nothing of it may reach the next one."""
        self.layers.clear()
        self._lineage, self._spare = Lineage(), {}
        old = self.request
        self.request = Request(rotary=old.rotary, moments=old.moments, choose=old.choose)

    def clear(self) -> None:
        """Forget the request as `reset` does, but keep the layers and the room of their zones for the next one.

        Raises PluginContractError where a store cannot forget.
        """
        self.end_step()
        for layer in self.layers.values():
            layer.clear()
        self._lineage, self._spare = Lineage(), {}
        self.request.forget_slots()

    def end_step(self) -> None:
        """Between two steps: full buffers leave for the zone."""
        count_selected(self.layers.values())
        for layer in self.layers.values():
            layer.finish_step()

    # Rows come and go, between two steps

    def settle(self) -> None:
        """Bring every layer between two steps: what is due has moved, and a prompt that was read has ended."""
        self.end_step()
        for layer in self.layers.values():
            if layer.prompt is not None:
                layer.end_prefill()

    def open_rows(self, infos: Iterable[LayerInfo]) -> None:
        """Begin with rows that hold nothing, ready to decode: `take_row` fills them."""
        for info in infos:
            self.layer(info).open_rows()

    def take_row(self, row: int, source: RequestState, source_row: int) -> None:
        """Make a row hold what a row of another request does."""
        self._lineage.forget(row)
        for index, layer in self.layers.items():
            layer.take_row(row, source.layers[index], source_row)
        self.request.forget_slots()

    def crop(self, row: int, tokens: int) -> None:
        """Forget a row's tokens from `tokens` on."""
        self._lineage.cropped(row, tokens)
        for layer in self.layers.values():
            layer.crop(row, tokens)
        self.request.forget_slots()

    def reorder(self, sources: Sequence[int]) -> None:
        """Let every row b hold what row sources[b] held; what the two have in common is not copied."""
        for row, source in moves(sources):
            common = self._lineage.common(row, source)
            for index, layer in self.layers.items():
                into, row_of_it = (self._spare_of(index), 0) if row == SPARE else (layer, row)
                out_of, its_row = (self._spare_of(index), 0) if source == SPARE else (layer, source)
                into.take_row(row_of_it, out_of, its_row, common)
                tokens = out_of.lengths[its_row]
            self._lineage.copied(row, source, tokens)
        self.request.forget_slots()

    def fork(self, new_tokens: int = HEADROOM) -> RequestState:
        """Another request that holds the same, between two steps; what is in the zones is shared with it.

        new_tokens  that it will generate, to make room for
        Raises BindingError where a store cannot be shared; then nothing has changed.
        """
        for layer in self.layers.values():
            refuse_fork(layer.pipeline, layer.store)
        other = self._like_this(new_tokens)
        other.layers = {index: layer.fork(other.request) for index, layer in self.layers.items()}
        other._lineage = self._lineage.copy()
        return other

    def with_rows(self, sources: Sequence[int]) -> RequestState:
        """Another request, whose row b holds a copy of this one's row sources[b]; between two steps."""
        other = self._like_this(self.request.new_tokens)
        other.open_rows(replace(layer.info, batch=len(sources)) for layer in self.layers.values())
        for row, source in enumerate(sources):
            other.take_row(row, self, source)
        for index, layer in self.layers.items():
            other.layers[index].columns = layer.columns
            other.layers[index].set_active([layer.active_rows[source] for source in sources])
        return other

    def _like_this(self, new_tokens: int) -> RequestState:
        """An empty request of the same stages, that will go on from what this one holds."""
        own = self.request
        other = RequestState(self.pipelines, self._window, own.rotary, own.choose, own.moments)
        other.request.prompt_tokens = max((layer.columns for layer in self.layers.values()), default=0)
        other.request.new_tokens = new_tokens
        return other

    def _spare_of(self, index: int) -> LayerState:
        if index not in self._spare:
            self._spare[index] = self._new_layer(replace(self.layers[index].info, batch=1))
            self._spare[index].open_rows()
        return self._spare[index]

    # What a captured step asks: see `pariskv.graph`

    def graph_reason(self) -> str:
        """The first layer's reason against capturing a step; empty where there is none."""
        reasons = ((index, pipeline.graph_reason) for index, pipeline in sorted(self.pipelines.items()))
        return next((f"layer {index}: {reason}" for index, reason in reasons if reason), "")

    def shape(self) -> object:
        return [layer.shape for layer in self.layers.values()]

    def count_step(self) -> None:
        for layer in self.layers.values():
            layer.count_step()

    # What it adds up to

    @property
    def attended_tokens_per_step(self) -> float:
        """Tokens that a query head attends to, mean over steps, layers, rows and key/value heads."""
        return sum(layer.attended for layer in self.layers.values()) / max(1, len(self.layers))

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return next(iter(self.layers.values())).lengths if self.layers else []

    @property
    def prefill_history(self) -> History:
        """Where the last prompt's chunks found the ones before them: store, if any layer's did."""
        return "store" if any(layer.prefill_history == "store" for layer in self.layers.values()) else "buffer"

    @property
    def kv_device_bytes(self) -> int:
        """Keys and values on the device: sink, ring and slots, a prompt being read, a store kept there."""
        total = 0
        for layer in (*self.layers.values(), *self._spare.values()):
            total += layer.device.nbytes if layer.device else 0
            total += layer.prompt.nbytes if layer.prompt else 0
            total += layer.store.device_bytes if layer.store else 0
        return total

    @property
    def kv_host_bytes(self) -> int:
        held = (*self.layers.values(), *self._spare.values())
        return sum(layer.store.host_bytes for layer in held if layer.store)

    @property
    def kv_dense_bytes(self) -> int:
        """What dense attention would hold for the same tokens."""
        return sum(dense_bytes(layer) for layer in self.layers.values())

    @property
    def code_bytes(self) -> int:
        return sum(layer.code_bytes for layer in self.layers.values())


def window_of(pipeline: LayerPipeline, window: WindowConfig, layer: int) -> Window:
    """The window of a layer: U is a multiple of the block of every format that it reads.

    Of every LAYERS_PER_STEP layers the local window is a token longer than of those before. So they move what is
    due one step later, and no step has the update of all layers in it.
    """
    update = math.lcm(window.update_interval, pipeline.block)
    lag = layer // LAYERS_PER_STEP % update
    return Window(window.sink, window.local + lag, update, window.dense_below).suited_to(pipeline.indexes)


def dense_bytes(layer: LayerState) -> int:
    """What dense attention would hold for the layer's tokens: a key and a value each."""
    info = layer.info
    tokens = sum(layer.lengths)
    element = torch.finfo(info.dtype).bits // 8
    return 2 * tokens * info.kv_heads * info.head_dim * element


def as_heads(query: Tensor, kv_heads: int) -> Tensor:
    """The model's queries of one token [B, H * G, 1, D] by key/value head [B, H, G, D]."""
    batch, heads, _, size = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads, size)
