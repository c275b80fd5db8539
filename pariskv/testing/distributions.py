"""Keys, values and queries that retrievers are tried on, each kind from a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pariskv.types import LayerInfo

Distribution = Literal["normal", "outliers", "clustered", "drifting", "needles"]
"""normal     independent coordinates
outliers   every 16th coordinate is large and nearly the same for all tokens, as after RoPE in trained models
clustered  keys around a few centres, each query near one of them
drifting   keys whose mean turns by 90 degrees from the first token to the last
needles    each query head points at a few tokens of its own, and the rest is noise
"""

DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)

CENTRES = 12
NEEDLES = 8


@dataclass(frozen=True)
class SamplePrompt:
    """What one layer sees of a prompt and of the step after it.

    keys, values  [B, H, N, D], N the longest row's tokens, laid out as a projection leaves them
    heads         [B, H, G, D], the step's queries
    """

    keys: Tensor
    values: Tensor
    heads: Tensor


def sample_prompt(layer: LayerInfo, lengths: Sequence[int], distribution: Distribution = "normal") -> SamplePrompt:
    """The same tensors at every call; rows are as long as the longest, and valid up to their own length."""
    generator = torch.Generator().manual_seed(0)
    rows = (layer.batch, max(lengths, default=0), layer.kv_heads, layer.head_dim)
    heads = torch.randn(layer.batch, layer.kv_heads, layer.group, layer.head_dim, generator=generator)
    keys, values = (torch.randn(rows, generator=generator).transpose(1, 2) for _ in range(2))
    keys, heads = _SHAPED[distribution](keys, heads, lengths, generator)
    return SamplePrompt(*(tensor.to(layer.device, layer.dtype) for tensor in (keys, values, heads)))


def _normal(keys: Tensor, heads: Tensor, lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return keys, heads


def _outliers(keys: Tensor, heads: Tensor, lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    keys[..., ::16] = keys[..., ::16] + 10
    return keys, heads


def _clustered(
    keys: Tensor, heads: Tensor, lengths: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    centres = torch.randn(CENTRES, keys.shape[-1], generator=generator)
    of_token = torch.randint(CENTRES, keys.shape[:-1], generator=generator)
    of_head = torch.randint(CENTRES, heads.shape[:-1], generator=generator)
    return keys.mul_(0.5).add_(centres[of_token]), heads * 0.3 + centres[of_head]


def _drifting(keys: Tensor, heads: Tensor, lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    begin, end = 2 * torch.randn(2, keys.shape[-1], generator=generator)
    angle = torch.linspace(0, math.pi / 2, keys.shape[2]).unsqueeze(-1)
    return keys.add_(begin * angle.cos() + end * angle.sin()), heads


def _needles(keys: Tensor, heads: Tensor, lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    for row, length in enumerate(lengths):
        many = min(NEEDLES, length // heads.shape[2])
        for head in range(heads.shape[1]):
            places = torch.randperm(length, generator=generator)[: many * heads.shape[2]]
            keys[row, head, places] += heads[row, head].repeat(many, 1)
    return keys, 2 * heads


_SHAPED = {
    "normal": _normal,
    "outliers": _outliers,
    "clustered": _clustered,
    "drifting": _drifting,
    "needles": _needles,
}
