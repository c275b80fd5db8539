"""`debug.trace_hooks`: a line for every hook call, with the shapes of what goes in and comes out, and the time.

    layer  3  rerank         exact            0.412 ms  query {heads f32[1,3,3,64]}, ... -> {indices i32[1,3,64]}

An empty line comes where the layers begin anew. The clock waits for the device before and after the call. Wrappers
around a stage are part of its time.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from pariskv.stages import STAGES, Stage
from pariskv.types import Codes, LayerInfo, Prefill, Store

REASON = "debug.trace_hooks prints every hook call"
"""Why a step that is traced cannot be captured in a graph."""


class Trace:
    """Writes to standard error; one for all layers of a request."""

    def __init__(self) -> None:
        self.last_layer = -1

    def around(self, stage: Stage, name: str, retriever: str, layer: int) -> Stage:
        """The stage `name` of a retriever in a layer, reporting its calls."""

        def traced(*arguments: object) -> object:
            _wait_for_device()
            start = time.perf_counter()
            result = stage(*arguments)
            _wait_for_device()
            milliseconds = 1e3 * (time.perf_counter() - start)
            given = ", ".join(f"{key} {shapes(one)}" for key, one in zip(STAGES[name], arguments, strict=True))
            self._say(layer, f"{name:14} {retriever:12} {milliseconds:9.3f} ms  {given} -> {shapes(result)}")
            return result

        return traced

    def _say(self, layer: int, text: str) -> None:
        if layer < self.last_layer:
            print(file=sys.stderr)
        self.last_layer = layer
        print(f"layer {layer:2}  {text}", file=sys.stderr)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def shapes(value: object) -> str:
    """What an argument or a result is made of, in a few words: dtypes and shapes of its tensors, counts of tokens."""
    match value:
        case Tensor():
            return f"{_short(value.dtype)}[{','.join(map(str, value.shape))}]"
        case Codes():
            return _joined([("length", value.length.tolist()), *value.fields.items()])
        case LayerInfo():
            return f"B={value.batch} H={value.kv_heads} G={value.group} D={value.head_dim} {_short(value.dtype)}"
        case Store():
            return f"{type(value).__name__} length {value.length}"
        case Prefill():
            return f"lengths {value.lengths}"
        case Mapping():
            return _joined(value.items())
        case tuple():
            return f"({', '.join(map(shapes, value))})"
        case _ if is_dataclass(value):
            return _joined(_parts(value))
        case _:
            return str(value)


def _short(dtype: torch.dtype) -> str:
    """float32 as f32, bfloat16 as bf16, uint8 as u8, int32 as i32."""
    return re.sub("loat|(?<=u)int|nt", "", str(dtype).removeprefix("torch."))


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The tensors and counts of a Query, a Selection and their like."""
    for field in fields(value):  # type: ignore[arg-type]  # a dataclass, as the caller has seen
        part = getattr(value, field.name)
        if isinstance(part, Tensor | Mapping | int) or is_dataclass(part):
            yield field.name, part


def _joined(parts: Iterable[tuple[str, object]]) -> str:
    return f"{{{', '.join(f'{name} {shapes(part)}' for name, part in parts)}}}"
