"""Retrievers driven by hand, and by the decode loop over a tiny model: what their tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import language_model
from torch import Tensor

from pariskv import ParisCache, parse_config
from pariskv.config import Config, GenerationConfig, RuntimeConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.types import Budget, Codes, LayerInfo, Tensors

SINK, LOCAL, U = 4, 8, 8

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layer_of(batch: int, heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> LayerInfo:
    return LayerInfo(0, batch, heads, group, dim, dtype, torch.device("cpu"), dim**-0.5)


def budget_of(counts: list[int], width: int) -> Budget:
    return Budget(width, torch.tensor(counts, dtype=torch.int32))


def filled(retriever: Any, layer: LayerInfo, keys: Tensor, lengths: list[int], state: Tensors) -> Codes:
    """Codes of keys [B, H, N, D], each row encoded alone; NaN, or 255, in everything past a row's length."""
    codes: Codes = retriever.allocate_codes(layer, keys.shape[2])
    for name, field in codes.fields.items():
        if codes.spec[name].reduce is None:
            field.fill_(float("nan") if field.is_floating_point() else 255)
    for row, length in enumerate(lengths):
        own = {name: tensor[row : row + 1] for name, tensor in state.items()}
        block = keys[row : row + 1, :, :length]
        codes.append([row], [0], retriever.encode(block, block, own), length)
    codes.length.copy_(torch.tensor(lengths, dtype=torch.int32))
    return codes


def config_of(
    retriever: str, options: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **layer: Any
) -> Config:
    """One retriever, called `it`, in every layer of a small window; no row is below dense_below."""
    values = {
        "retrievers": {"it": {"type": retriever, **(options or {})}},
        "layers": {"default": {"retriever": "it", **layer}, **(more or {})},
        "window": {"sink": SINK, "local": LOCAL, "update_interval": U, "dense_below": 0},
    }
    return parse_config(values)


def generated(
    model: Any, ids: Tensor, config: Config, new: int, mask: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, ParisCache]:
    """The tokens [B, new] that our loop generates greedily, and its cache."""
    lm, batch, cache = language_model(model), Batch(ids, mask), ParisCache(model, config)
    logits = prefill(lm, cache, batch, new, chunk)
    runtime = RuntimeConfig("on" if ids.is_cuda else "off")  # on a device every step must be captured
    steps = list(decode(lm, cache, batch, logits, GenerationConfig(max_new_tokens=new), runtime))
    return torch.tensor(steps).T, cache


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts [1, n] of different lengths as one batch, padded on the left, and its mask."""
    longest = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.bool)
    for place, row in enumerate(rows):
        ids[place, longest - row.shape[1] :] = row
        mask[place, longest - row.shape[1] :] = True
    return ids, mask
