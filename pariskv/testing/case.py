"""The prompt that a retriever is tried on, and how its stages are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.stages import Stage, Traits
from pariskv.testing.graphs import AsksHost, no_host
from pariskv.types import Codes, LayerInfo

ONLY_READ = {"fetch": 1, "append": 2}
"""Of the stages that write to their last arguments, the slots and the working set: how many they only read."""


@dataclass(frozen=True)
class Case:
    """The retriever, its producer and the prompt that they are tried on."""

    name: str
    stages: dict[str, Stage]
    traits: Traits
    source: dict[str, Stage]  # of the codes' producer
    made: Traits  # the same
    layer: LayerInfo
    lengths: list[int]
    top_k: int
    keys: Tensor  # [B, H, N, D]
    values: Tensor
    heads: Tensor  # [B, H, G, D]

    @property
    def rows(self) -> range:
        return range(self.layer.batch)

    def wrong(self, stage: str, what: str) -> PluginContractError:
        return PluginContractError(f"{self.name}.{stage}: {what}")

    def call(self, stage: str, *arguments: Any) -> Any:
        """A stage's result; what it raises becomes a PluginContractError, and so does writing to its input."""
        return self._call(stage, arguments, nullcontext())

    def call_again(self, stage: str, *arguments: Any) -> Any:
        """The same of a stage that has run before: where it declares graph_safe, it must ask the host nothing now."""
        traits = self.traits if stage in self.stages else self.made
        return self._call(stage, arguments, no_host() if traits.graph_safe else nullcontext())

    def _call(self, stage: str, arguments: Sequence[Any], guard: AbstractContextManager[object]) -> Any:
        given = [tensor for argument in arguments[: ONLY_READ.get(stage)] for tensor in tensors_in(argument)]
        before = [tensor.clone() for tensor in given]
        try:
            with guard:
                result = (self.stages.get(stage) or self.source[stage])(*arguments)
        except AsksHost as error:
            raise self.wrong(
                stage,
                f"declares graph_safe, but {error} asks the host, which a CUDA graph cannot hold; keep shapes fixed, "
                f"mask by torch.where, leave lengths and counts on the device, or declare graph_safe = False",
            ) from error
        except Exception as error:
            raise self.wrong(stage, f"raised {type(error).__name__}: {error}") from error
        if not all(same_bits(old, tensor) for old, tensor in zip(before, given, strict=True)):
            raise self.wrong(stage, "changes its input; work on a copy")
        return result


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of an argument: of a Query, a Selection, Codes, a mapping."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Codes):
        yield from (*value.fields.values(), value.length)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.contiguous(), other.contiguous()
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)) if one.numel() else True
