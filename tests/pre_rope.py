"""A format that asks for keys before the rotary embedding, and what the model's projections made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pariskv import TOKENS, CodeField, Codes, LayerInfo, Prefill, Register, Retriever, hookimpl
from pariskv.registry import Registry, Source
from pariskv.types import Tensors


class PreRope(Retriever):
    format = "probe"
    needs = frozenset({"pre_rope"})

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity, mark=CodeField((TOKENS,), torch.uint8))

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        self.seen[layer.index] = torch.cat(list(prefill.pre_rope_blocks(0)), dim=1)
        return {"nothing": torch.zeros(layer.batch, 1)}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"mark": torch.ones(keys.shape[:3], dtype=torch.uint8)}


def offered(probe: PreRope) -> Registry:
    """The built-ins and the probe."""
    registry = Registry.load(entry_points=False)

    @hookimpl
    def register_retrievers(register: Register) -> None:
        register("probe", lambda: probe)

    registry._add(Source("probe", "tests", "0"), lambda: SimpleNamespace(register_retrievers=register_retrievers))
    return registry


@contextmanager
def projected_keys(model: Any) -> Iterator[dict[int, Tensor]]:
    """The prompt's keys [H, n, D] of each layer as the projection (and the key norm) made them."""
    found: dict[int, Tensor] = {}
    handles = []

    def keep(index: int, head_dim: int, heads: int) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            if output.shape[1] > 1:
                flat = output.reshape(1, output.shape[1], -1)
                start = model.config.num_attention_heads * head_dim if "qkv" in type_of[index] else 0
                keys = flat[..., start : start + heads * head_dim]
                found[index] = keys.view(1, -1, heads, head_dim)[0].transpose(0, 1)

        return hook

    type_of: dict[int, str] = {}
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        type_of[index] = next(n for n in ("k_norm", "k_proj", "qkv_proj") if hasattr(attention, n))
        module = getattr(attention, type_of[index])
        heads, size = model.config.num_key_value_heads, attention.head_dim
        handles.append(module.register_forward_hook(keep(index, size, heads)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
