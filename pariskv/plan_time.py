"""What a decode step and a prompt take at least: the bytes that a step has to read once, over the rates at which they
can be read, and the operations of a prompt, over their rate.

step_bytes       of one step: weights, sink and ring, codes, selected rows
dense_bytes      of the same step with dense attention: weights, all keys and values
step_time        both as times
prompt_flops     of the prompts of a batch: weights, and attention to the tokens before
answers_seconds  a batch of whole answers, step by step, and its prompts where their rate is known

Nothing else is counted: no computation in a step, no memory in a prompt, no launches, no writes, no codes that are
made, no attention of the layers that keep a cache of their own (sliding windows). So it takes at least this long, and
mostly longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from pariskv.binding import Encoder, LayerPipeline
from pariskv.budget import CandidateRule
from pariskv.errors import ConfigError
from pariskv.plan import Described, split
from pariskv.types import TOKENS, LayerInfo
from pariskv.units import parse_flops, parse_rate, with_option
from pariskv.window import Window


@dataclass(frozen=True)
class Rates:
    """What the hardware does in a second.

    memory  bytes that are read from the device's memory
    bus     bytes that come from the host, None: what crosses the bus costs nothing
    flops   operations of multiplied matrices, None: prompts cost nothing
    """

    memory: int
    bus: int | None = None
    flops: int | None = None

    @classmethod
    def parse(cls, bandwidth: str | None, bus: str | None, flops: str | None) -> Rates | None:
        """Those of the options `--bandwidth`, `--bus` and `--flops`, None without any.

        Raises ConfigError for what is no rate, and for the others without `--bandwidth`.
        """
        others = (("--bus", parse_rate, bus), ("--flops", parse_flops, flops))
        if bandwidth is None:
            for option, _, text in others:
                if text is not None:
                    raise ConfigError(f"{option}: got {text!r} without --bandwidth; give both, or neither")
            return None
        given = (None if text is None else with_option(option, parse, text) for option, parse, text in others)
        return cls(with_option("--bandwidth", parse_rate, bandwidth), *given)

    def seconds(self, read: StepBytes) -> float:
        """Memory and bus may be busy at the same time, so the longer of the two counts."""
        return max(read.device / self.memory, read.bus / self.bus if self.bus else 0.0)


@dataclass(frozen=True)
class StepBytes:
    """What one step reads, or several, in bytes: from the device's memory, and over the bus."""

    device: int
    bus: int = 0


@dataclass(frozen=True)
class Pace:
    """A step of all rows together takes `step_ms` at least, and all rows get `tokens_per_s` at most."""

    step_ms: float
    tokens_per_s: float

    @classmethod
    def of(cls, seconds: float, batch: int) -> Pace:
        return cls(1e3 * seconds, batch / seconds)


@dataclass(frozen=True)
class StepTime(Pace):
    """The same beside dense attention.

    prompt_s  seconds in which the prompts before are read at least, by either, None where their rate is not known
    """

    dense: Pace
    prompt_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The section `time` of `--json`."""
        return asdict(self)


def step_time(model: Described, rates: Rates, context: int, batch: int) -> StepTime:
    """The last step of `batch` rows of `context` tokens each, prompt and new ones together."""
    prompt, _ = split(context, model.new)
    ours = rates.seconds(step_bytes(model, prompt, context, batch))
    dense = rates.seconds(StepBytes(dense_bytes(model, context, batch)))
    prompt_s = prompt_seconds(model, rates, prompt, batch) if rates.flops else None
    return StepTime(1e3 * ours, batch / ours, Pace.of(dense, batch), prompt_s)


def step_bytes(model: Described, prompt: int, tokens: int, batch: int) -> StepBytes:
    """What a step reads that makes rows of a prompt `tokens` long."""
    return _step(model, _layers(model), prompt, tokens, batch)


def dense_bytes(model: Described, tokens: int, batch: int) -> int:
    """What the step reads with dense attention."""
    planner = model.planner
    return model.step_weights + batch * tokens * sum(_row_bytes(planner.info(index, 1)) for index in planner.pipelines)


def prompt_flops(model: Described, prompt: int, batch: int) -> int:
    """Operations in which the prompts of a batch are read: two for each number of a matrix, and causal attention."""
    infos = [model.planner.info(index, 1) for index in model.planner.pipelines]
    # Two products, of the scores and of the values, each of two operations, with half of the square of the tokens.
    attention = sum(2 * one.kv_heads * one.group * one.head_dim for one in infos) * prompt * (prompt + 1)
    return batch * (2 * model.prompt_weights * prompt + attention)


def prompt_seconds(model: Described, rates: Rates, prompt: int, batch: int) -> float:
    """Seconds in which the prompts of a batch are read at least; 0 where nobody says at which rate."""
    return prompt_flops(model, prompt, batch) / rates.flops if rates.flops else 0.0


def answers_seconds(model: Described, rates: Rates, prompt: int, new_tokens: int, batch: int) -> float:
    """Seconds in which a batch reads its prompts and decodes answers of `new_tokens` tokens each."""
    reads = [(layer.sum(prompt, new_tokens), many) for layer, many in _layers(model).items()]
    device = new_tokens * model.step_weights + batch * sum(one.device * many for one, many in reads)
    decoding = rates.seconds(StepBytes(device, batch * sum(one.bus * many for one, many in reads)))
    return prompt_seconds(model, rates, prompt, batch) + decoding


def dense_answers_seconds(model: Described, rates: Rates, prompt: int, new_tokens: int, batch: int) -> float:
    """The same with dense attention, whose step grows by as much with every token."""
    ends = (dense_bytes(model, tokens, batch) for tokens in (prompt + 1, prompt + new_tokens))
    return prompt_seconds(model, rates, prompt, batch) + new_tokens * sum(ends) / 2 / rates.memory


@dataclass(frozen=True)
class _LayerReads:
    """What a layer reads of one row of a batch.

    row         bytes of a token's keys and values
    code        bytes of codes that every token of the zone costs;    candidate  that a candidate costs besides
    rows        selected rows that are read, 0 where nobody promises how many
    is_offloaded  they come over the bus
    """

    window: Window
    row: int
    code: Fraction
    candidate: Fraction
    candidates: CandidateRule
    top_k: int
    rows: int
    is_offloaded: bool

    def sum(self, prompt: int, new_tokens: int) -> StepBytes:
        """What all steps of an answer read: while the zone stays, each reads one row more than the last."""
        device = bus = 0
        tokens, end = prompt + 1, prompt + new_tokens
        while tokens <= end:
            last = min(end, self.window.last_of_zone(tokens))
            steps, first = last - tokens + 1, self.at(prompt, tokens)
            device += steps * first.device + self.row * (steps * (steps - 1) // 2)
            bus += steps * first.bus
            tokens = last + 1
        return StepBytes(device, bus)

    def at(self, prompt: int, tokens: int) -> StepBytes:
        zone = self.window.zone_from(self.window.zone(prompt), tokens)
        count = self.candidates.count(zone, self.top_k) if zone else 0
        selected = self.row * min(zone, self.rows)
        device = self.row * (tokens - zone) + math.floor(self.code * zone + self.candidate * count)
        return StepBytes(device, selected) if self.is_offloaded else StepBytes(device + selected)


def _step(model: Described, layers: Mapping[_LayerReads, int], prompt: int, tokens: int, batch: int) -> StepBytes:
    reads = [(layer.at(prompt, tokens), many) for layer, many in layers.items()]
    device = sum(one.device * many for one, many in reads)
    return StepBytes(model.step_weights + batch * device, batch * sum(one.bus * many for one, many in reads))


def _layers(model: Described) -> Counter[_LayerReads]:
    """How many layers there are of each kind."""
    planner = model.planner
    return Counter(
        _layer(planner.info(index, 1), pipeline, planner.windows[index])
        for index, pipeline in planner.pipelines.items()
    )


def _layer(info: LayerInfo, pipeline: LayerPipeline, window: Window) -> _LayerReads:
    code, candidate = Fraction(), Fraction()
    for encoder in pipeline.encoders:
        every, chosen = _entry_bytes(info, encoder)
        if encoder.name == pipeline.coarse_codes:
            code += every
        elif encoder.name == pipeline.rerank_codes:
            candidate += every
        if encoder.name == pipeline.rerank_codes:
            candidate += chosen
    # A store of its own may move less than whole rows; without a rerank a selection may be shorter than top_k.
    is_whole = pipeline.names.get("fetch") != pipeline.names.get("coarse_select")
    is_promised = pipeline.rerank is not None and not pipeline.adapts_top_k
    return _LayerReads(
        window=window,
        row=_row_bytes(info),
        code=code,
        candidate=candidate,
        candidates=pipeline.candidates,
        top_k=pipeline.top_k,
        rows=pipeline.top_k if is_whole and is_promised else 0,
        is_offloaded=pipeline.host_resident and info.device.type == "cuda",
    )


def _row_bytes(info: LayerInfo) -> int:
    return 2 * info.kv_heads * info.head_dim * info.dtype.itemsize


def _entry_bytes(info: LayerInfo, encoder: Encoder) -> tuple[Fraction, Fraction]:
    """Bytes of a token's codes in all heads of a row: of what is read of all tokens, and of candidates only."""
    codes = encoder.allocate_codes(replace(info, batch=1, device=torch.device("meta")), encoder.block)
    found = {"all": Fraction(), "candidates": Fraction(), "part": Fraction()}
    for name, field in codes.spec.items():
        is_elsewhere = info.device.type == "cuda" and codes[name].device.type == "cpu"
        if field.reduce is None and not is_elsewhere:
            size = math.prod(size for size in field.shape if size != TOKENS)
            found[field.read] += Fraction(info.kv_heads * size * field.dtype.itemsize, field.tokens_per_entry)
    return found["all"], found["candidates"]
