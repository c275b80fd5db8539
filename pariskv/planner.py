"""What a request takes of the memory, moment by moment, before anything of it is allocated.

estimate_layer   what can be computed of one layer: the prompt's buffer, store, rows, codes
Planner          the whole request: the largest of its moments, with what is measured beforehand
                 (`pariskv.rehearsal` for the stages, `pariskv.integrations.activations` for the model's forward)

Three kinds of moments count: a chunk goes through the model; the prefill ends, layer by layer; a step is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch

from pariskv import memory
from pariskv.attention_memory import attention_bytes, streamed_bytes
from pariskv.binding import LayerPipeline
from pariskv.config import Config
from pariskv.prompt import History
from pariskv.rehearsal import Figures, Rehearsal
from pariskv.types import LayerInfo
from pariskv.window import Window

WHOLE_PROMPT = 16_384
"""`prefill.chunk: auto` reads prompts up to this length in one chunk, longer ones in halves of it."""

PLENTY = 8
"""Where this many times what can be computed is free, nothing else is measured: it was never more than that."""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that fits, by bisection; 0 where `low` does not.

    fits  holds for every number below one that it holds for
    """
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def chunk_for(setting: Literal["auto"] | int, prompt_tokens: int) -> int | None:
    """Tokens of a prompt that go through the model at a time by `prefill.chunk`, None for all of them."""
    if setting != "auto":
        return setting
    return None if prompt_tokens <= WHOLE_PROMPT else WHOLE_PROMPT // 2


@dataclass(frozen=True)
class Estimate:
    """Bytes of what can be computed of a request.

    prompt  what of the prompt's keys and values is on the device while it is read: all, or what the store has not
    store   the zone's rows;    rows    sink, ring and slots;    codes    the index
    hosted  what of the store is in host memory beside a GPU; on a CPU everything is in the one memory
    """

    prompt: int = 0
    store: int = 0
    rows: int = 0
    codes: int = 0
    hosted: int = 0

    @property
    def on_device(self) -> int:
        """The prompt and the rows are there together for a moment, in one layer at least."""
        return self.prompt + self.store + self.rows + self.codes - self.hosted

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Need:
    """What a request takes at its largest, the model's weights not among it.

    held     what can be computed
    peak     bytes on the device at the largest moment
    graph    of it, the private memory of a captured step; 0 where steps are eager
    moment   which moment is the largest
    history  how the prompt is read
    """

    held: Estimate
    peak: int
    graph: int = 0
    moment: str = ""
    history: History = "buffer"


@dataclass(frozen=True)
class Trace:
    """Bytes of a model's forward over one chunk, beside weights and full-attention layers' keys and values.

    before  of each of these layers: the most from the last one's attention (or the beginning) to its own
    attend  what is alive when its attention begins
    after   the most behind the last one's attention, the logits among it
    """

    before: Sequence[int]
    attend: Sequence[int]
    after: int

    @property
    def values(self) -> list[int]:
        return [*self.before, *self.attend, self.after]


class Forward(Protocol):
    """What the planner asks of a model; see `pariskv.integrations.activations`."""

    def at(self, batch: int, tokens: int, chunked: bool) -> Trace: ...

    def logits(self, batch: int) -> int: ...

    def stock(self, batch: int, tokens: int) -> int: ...


@dataclass(frozen=True)
class Planner:
    """How the prompts of a model are read, and what their requests take.

    config             of the cache: its `prefill`, `generation` and `runtime` sections
    info               (layer index, batch rows) -> the layer's sizes
    pipelines, windows of the layers that retrieve
    forward            makes the model's traces when they are first asked for; None: nothing is measured
    known              what was measured, by what it is about; planners of one model may share it
    """

    config: Config
    info: Callable[[int, int], LayerInfo]
    pipelines: Mapping[int, LayerPipeline]
    windows: Mapping[int, Window]
    device: torch.device
    forward: Callable[[], Forward | None] | None = None
    known: dict[object, Any] = field(default_factory=dict)

    def history(self, batch: int, prompt_tokens: int, new_tokens: int) -> History:
        """Where the earlier chunks of such a prompt are, by what is free now.

        Of a later turn all tokens count, as if nothing were held: it goes over the store rather too early.
        """
        return self.history_in(memory.available_bytes(self.device), batch, prompt_tokens, new_tokens)

    def history_in(self, free: int | None, batch: int, prompt_tokens: int, new_tokens: int) -> History:
        """The same where `free` bytes of the device are free beside the weights, None for any."""
        wanted = self.config.prefill.history
        if wanted != "auto":
            return wanted
        if free is None or self.is_small(free, batch, prompt_tokens, new_tokens):
            return "buffer"
        return "buffer" if self.estimate(batch, prompt_tokens, new_tokens, "buffer").peak <= free else "store"

    def is_small(self, free: int, batch: int, prompt_tokens: int, new_tokens: int) -> bool:
        """Whether the request is so small beside what is free that nothing needs to be measured."""
        return PLENTY * self.computed(batch, prompt_tokens, new_tokens).peak <= free

    def computed(self, batch: int, prompt_tokens: int, new_tokens: int) -> Need:
        """What can be said of a request without measuring anything, its prompt in a buffer."""
        return replace(self, forward=None).estimate(batch, prompt_tokens, new_tokens, "buffer")

    def refuse(self, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        """Raise CapacityError where neither way to read the prompt fits into what is free; it names a length that does.

        A request that is small beside what is free is not measured.
        """
        free, host = memory.available_bytes(self.device), memory.available_bytes(torch.device("cpu"))

        def need_of(tokens: int) -> Need:
            if free is None or self.is_small(free, batch, tokens, new_tokens):
                return self.computed(batch, tokens, new_tokens)
            return self.estimate(batch, tokens, new_tokens, self.history_in(free, batch, tokens, new_tokens))

        def fits(tokens: int) -> bool:
            need = need_of(tokens)
            is_held = not need.held.hosted or host is None or need.held.hosted <= host
            return is_held and (free is None or need.peak <= free)

        need = need_of(prompt_tokens)
        wanted = self.config.prefill.history
        memory.refuse_if_too_large(need, self.device, wanted, lambda: largest(fits, 1, prompt_tokens))

    def held(self, batch: int, prompt_tokens: int, new_tokens: int, history: History) -> dict[int, Estimate]:
        """What can be computed of each layer."""
        return {
            index: estimate_layer(
                self.info(index, batch), pipeline, self.windows[index], prompt_tokens, new_tokens, history
            )
            for index, pipeline in self.pipelines.items()
        }

    def estimate(self, batch: int, prompt_tokens: int, new_tokens: int, history: History | None = None) -> Need:
        """What such a request takes; history None: in the way in which its prompt would be read."""
        history = history or self.history(batch, prompt_tokens, new_tokens)
        return _Moments(self, batch, prompt_tokens, new_tokens, history).need()

    def figures(self, index: int, zone: int, tokens: int, batch: int) -> Figures:
        """What the stages of a layer hold and borrow."""
        if self.forward is None:
            return Figures()
        pipeline, info = self.pipelines[index], replace(self.info(index, 1), index=0, model="")
        kind = repr((info, pipeline.names, pipeline.top_k, pipeline.candidates, [e.name for e in pipeline.encoders]))
        key = f"{kind} {self.config.retrievers} {self.config.window}"
        if key not in self.known:
            self.known[key] = Rehearsal(info, pipeline, self.windows[index])
        rehearsal: Rehearsal = self.known[key]
        return rehearsal.at(zone, tokens, batch)

    def model(self) -> Forward | None:
        """The model's traces, made once."""
        if self.forward is not None and "forward" not in self.known:
            self.known["forward"] = self.forward()
        found: Forward | None = self.known.get("forward") if self.forward is not None else None
        return found

    def chunk(self, prompt_tokens: int) -> int:
        """Tokens of such a prompt that go through the model at a time."""
        return min(prompt_tokens, chunk_for(self.config.prefill.chunk, prompt_tokens) or prompt_tokens)

    @property
    def whole_prompt(self) -> int:
        """The longest prompt that is read in one chunk."""
        return WHOLE_PROMPT if self.config.prefill.chunk == "auto" else self.config.prefill.chunk

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed from a CUDA graph."""
        reasons = (pipeline.graph_reason for pipeline in self.pipelines.values())
        return self.device.type == "cuda" and self.config.runtime.graph != "off" and not any(reasons)


class _Moments:
    """The moments of one request: bytes on the device beside the weights."""

    def __init__(self, planner: Planner, batch: int, prompt_tokens: int, new_tokens: int, history: History):
        self.planner, self.batch, self.history = planner, batch, history
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        self.order = sorted(planner.pipelines)
        self.infos = [planner.info(index, batch) for index in self.order]
        held = planner.held(batch, prompt_tokens, new_tokens, history)
        self.layers = [held[index] for index in self.order]
        # While the prompt is read and while it is decoded: the zone may only begin later.
        self.reading = [self._figures(index, prompt_tokens) for index in self.order]
        self.decoding = [self._figures(index, prompt_tokens + new_tokens) for index in self.order]
        self.chunk = planner.chunk(prompt_tokens)
        self.chunked = history == "store" or self.chunk < prompt_tokens
        self.forward = planner.model()
        self.ids = 8 * batch * prompt_tokens
        self.moments = sum(_moment_bytes(planner.pipelines[index], self.infos[i]) for i, index in enumerate(self.order))

    def _figures(self, index: int, tokens: int) -> Figures:
        return self.planner.figures(index, self.planner.windows[index].zone(tokens), tokens, self.batch)

    def need(self) -> Need:
        total = sum(self.layers, Estimate())
        step = self.step()
        graph = step if self.planner.is_captured else 0
        found = {"reading the prompt": self.chunk_peak(), "ending the prefill": self.ending(), "decoding": self.held()}
        found["decoding"] += step
        moment = max(found, key=lambda name: found[name])
        return Need(total, found[moment] + self.ids + self.moments, graph, moment, self.history)

    def chunk_peak(self) -> int:
        """While the last chunk goes through the model, or the only one."""
        fixed = [
            one.store - one.hosted + one.codes + two.queries for one, two in zip(self.layers, self.reading, strict=True)
        ]
        prompts = [one.prompt for one in self.layers]
        everything = sum(fixed) + sum(prompts)
        trace = self._trace(self.chunk)
        kept = [sum(prompts)] * len(prompts) if self.chunked else list(accumulate(prompts))
        taken = [sum(fixed)] * len(fixed) if self.chunked else list(accumulate(fixed))
        found = [everything + trace.after]
        for i, info in enumerate(self.infos):
            before = kept[i] + (taken[i - 1] if i or self.chunked else 0)
            out = info.batch * info.kv_heads * info.group * self.chunk * info.head_dim * info.dtype.itemsize
            found.append(before + trace.before[i])
            found.append(before + trace.attend[i] + self._attention(i))
            found.append(kept[i] + taken[i] + trace.attend[i] + out + self._taking(i))
        return max(found)

    def _attention(self, i: int) -> int:
        info, index = self.infos[i], self.order[i]
        pipeline, window = self.planner.pipelines[index], self.planner.windows[index]
        if self.history == "store" and pipeline.indexes != "none":
            before = self.prompt_tokens - self.chunk
            zone = window.zone(before)
            return streamed_bytes(info, self.chunk, self.prompt_tokens - zone, zone)
        return attention_bytes(info, self.chunk, self.prompt_tokens)

    def _taking(self, i: int) -> int:
        """`encode` and `update` of what a chunk lets leave: a chunk and an update at most."""
        index = self.order[i]
        zone = self.planner.windows[index].zone(self.prompt_tokens)
        return self.planner.figures(index, min(zone, self.chunk), self.prompt_tokens, self.batch).taking

    def _trace(self, tokens: int, chunked: bool | None = None) -> Trace:
        if self.forward is None:
            return Trace([0] * len(self.layers), [0] * len(self.layers), 0)
        return self.forward.at(self.batch, tokens, self.chunked if chunked is None else chunked)

    def ending(self) -> int:
        """Layer by layer, the prompt's buffer gives way to the device's rows."""
        rest = sum(one.store - one.hosted + one.codes for one in self.layers)
        before = [one.prompt + two.queries for one, two in zip(self.layers, self.reading, strict=True)]
        after = [one.rows + two.state for one, two in zip(self.layers, self.reading, strict=True)]
        found = []
        for i, figures in enumerate(self.reading):
            found.append(sum(after[:i]) + sum(before[i:]) + figures.ending)
        return rest + max(found) + self._logits()

    def held(self) -> int:
        """What is there between two steps, at the end."""
        own = sum(one.store - one.hosted + one.codes + one.rows for one in self.layers)
        stock = self.forward.stock(self.batch, self.prompt_tokens + self.new_tokens) if self.forward else 0
        return own + sum(one.state for one in self.decoding) + stock + self._logits()

    def step(self) -> int:
        """The temporaries of one step: the model's forward, a layer's stages, the choice of a token."""
        trace = self._trace(1, chunked=True)
        stages = max((at + one.step for at, one in zip(trace.attend, self.decoding, strict=True)), default=0)
        return max(*trace.values, stages, self._sampling())

    def _logits(self) -> int:
        return 0 if self.forward is None else self.forward.logits(self.batch)

    def _sampling(self) -> int:
        """Greedy choice has no temporaries of note; sampling has seven tensors of float64 over the vocabulary."""
        generation = self.planner.config.generation
        return 0 if generation.temperature == 0 else 7 * 8 * self._logits() // self.infos[0].dtype.itemsize


def _moment_bytes(pipeline: LayerPipeline, info: LayerInfo) -> int:
    """A calibration's query moments [H, D, D] in float32, where a format wants them and there may be one."""
    wants = any("model_moment" in encoder.needs for encoder in pipeline.encoders)
    return 4 * info.kv_heads * info.head_dim**2 if wants else 0


def estimate_layer(
    info: LayerInfo,
    pipeline: LayerPipeline,
    window: Window,
    prompt_tokens: int,
    new_tokens: int,
    history: History = "buffer",
) -> Estimate:
    """What can be computed of one layer of a request whose prompt is read in that way."""
    tokens = prompt_tokens + new_tokens
    row = 2 * info.batch * info.kv_heads * info.head_dim * info.dtype.itemsize
    window = window.suited_to(pipeline.indexes)
    zone = window.zone_from(window.zone(prompt_tokens), tokens)
    is_streamed = history == "store" and pipeline.indexes != "none"
    # A row that grows from nothing holds as much at most, whether decoded or read.
    held = min(tokens, window.sink + window.while_reading().ring_capacity(0, tokens)) if is_streamed else prompt_tokens
    steady = window.sink + window.ring_capacity(prompt_tokens, tokens)
    rows = row * (steady + pipeline.slots(info.group)) + info.batch * steady
    codes = sum(code_bytes(info, encoder.allocate_codes, encoder.block, zone) for encoder in pipeline.encoders)
    hosted = row * zone if pipeline.host_resident and info.device.type == "cuda" else 0
    return Estimate(prompt=row * held, store=row * zone, rows=rows, codes=codes, hosted=hosted)


def code_bytes(info: LayerInfo, allocate_codes: object, block: int, tokens: int) -> int:
    """Bytes of a format's codes for `tokens` tokens a row, from two small allocations on a line."""
    assert callable(allocate_codes)
    if not tokens:
        return 0
    small = replace(info, batch=1, device=torch.device("cpu"))
    step = 8 * block
    one, two = (int(allocate_codes(small, count).nbytes) for count in (step, 2 * step))
    return info.batch * (one + (two - one) * max(0, tokens - step) // step)
