"""Dense attention of one token to its whole history: what a layer's retrieval must beat."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pariskv.attention import dense_attention
from pariskv.bench.room import refuse, release
from pariskv.bench.timing import Timer, layers_to_cycle
from pariskv.errors import CapacityError
from pariskv.types import LayerInfo

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Dense:
    """Microseconds of every backend that can do it; `why` where none ran."""

    us: dict[str, float] = field(default_factory=dict)
    why: str | None = None

    @property
    def backend(self) -> str | None:
        """The faster one."""
        return min(self.us, key=lambda name: self.us[name], default=None)

    @property
    def best_us(self) -> float | None:
        return min(self.us.values(), default=None)


def measure_dense(timer: Timer, info: LayerInfo, tokens: int, measured: dict[str, Any]) -> Dense:
    """`time_dense`, with every backend's time added to what a run has measured."""
    dense = time_dense(timer, info, tokens)
    found = {"tokens": tokens, "batch": info.batch, "backend": dense.backend, "us": dense.us}
    measured.setdefault("dense", []).append(found)
    return dense


def time_dense(timer: Timer, info: LayerInfo, tokens: int) -> Dense:
    """One token's SDPA over `tokens` keys and values by each backend, cycling through layers."""
    layer_bytes = 2 * info.batch * info.kv_heads * tokens * info.head_dim * info.dtype.itemsize
    layers = layers_to_cycle(layer_bytes, timer.l2_bytes)
    try:
        refuse(layers * layer_bytes, info.device, f"{layers} layers of {info.batch} x {tokens} tokens")
    except CapacityError as error:
        return Dense(why=f"dense: {error}")
    size = (info.batch, info.kv_heads, tokens, info.head_dim)
    query = torch.randn(info.batch, info.kv_heads * info.group, 1, info.head_dim, dtype=info.dtype, device=info.device)
    pairs = [torch.randn(2, *size, dtype=info.dtype, device=info.device).unbind() for _ in range(layers)]
    us: dict[str, float] = {}
    for name, backend in BACKENDS.items():
        calls = [partial(dense_attention, query, keys, values, None, info.scaling) for keys, values in pairs]
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says why a backend cannot, then raises
            try:
                us[name] = 1e6 * timer.seconds(calls)
            except RuntimeError as error:
                if "No viable backend" not in str(error) and "No available kernel" not in str(error):
                    raise
    del pairs
    release(info.device)
    return Dense(us, None if us else f"dense: neither {' nor '.join(BACKENDS)} can attend to {tokens} tokens")
