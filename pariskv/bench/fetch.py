"""The fetch stage on its own, for `pariskv bench kernels`: rows of a store to their slots, step after step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, refuse
from pariskv.bench.synthetic import bench_config, bench_pipeline, overlapping_indices
from pariskv.bench.timing import Timer
from pariskv.binding import LayerPipeline
from pariskv.errors import CapacityError
from pariskv.filling import CHUNK
from pariskv.types import LayerInfo, Selection, Store

if TYPE_CHECKING:
    from pariskv.bench.kernels import Settings


def fetch_row(settings: Settings, timer: Timer, tokens: int, top_k: int, store: str, measured: dict[str, Any]) -> Row:
    """`fetch` of rows whose indices overlap from step to step.

    bytes  those that have to move: over the bus from a store in host memory, read and written in device memory
    """
    name = fetch_name(settings, store, top_k)
    try:
        seconds = _seconds(settings, timer, tokens, top_k, store)
    except TOO_LARGE as error:
        return make_row("kernels", reason(error), kernel=name, tokens=tokens)
    moved = settings.batch * settings.kv_heads * top_k * 2 * settings.head_dim * settings.dtype.itemsize
    bandwidth = measured["bus_bytes_per_s"]
    if store == "resident":
        moved, bandwidth = 2 * moved, measured["copy_bytes_per_s"]
    elif store == "uva reuse":
        moved = round(moved * (1 - settings.overlap))
    return make_row(
        "kernels",
        kernel=name,
        tokens=tokens,
        us=1e6 * seconds,
        bytes=moved,
        bandwidth_fraction=moved / seconds / bandwidth,
    )


def fetch_name(settings: Settings, store: str, top_k: int) -> str:
    """`fetch uva 2048`, and `fetch uva 2048 reuse 70%` where rows of the last step stay."""
    name, _, reuse = store.partition(" ")
    return f"fetch {name} {top_k}" + (f" reuse {settings.overlap:.0%}" if reuse else "")


def _seconds(settings: Settings, timer: Timer, tokens: int, top_k: int, store: str) -> float:
    if tokens < 2 * top_k:
        raise CapacityError(f"{tokens} tokens are too few to choose {top_k} others at every step")
    layers, info = settings.layers(timer, tokens), settings.info(timer.device)
    pipeline, _ = bench_pipeline(bench_config(store, top_k, settings.candidates), timer.device)
    stores = [filled_store(info, pipeline, tokens, in_host=store != "resident") for _ in range(layers)]
    shape = (layers, settings.batch, settings.kv_heads)
    steps = overlapping_indices(shape, top_k, tokens, settings.overlap, timer.runs, timer.device)
    indices = steps[0].clone()  # [L, B, H, K], which the captured calls read
    size = (*shape, 2, top_k, settings.head_dim)
    slots = torch.empty(size, dtype=settings.dtype, device=timer.device).transpose(3, 4)
    fetch = pipeline.fetch
    assert fetch is not None
    calls = [partial(fetch, Selection(indices[one]), stores[one], slots[one]) for one in range(layers)]
    return timer.seconds(calls, lambda run: indices.copy_(steps[run]))


def filled_store(info: LayerInfo, pipeline: LayerPipeline, tokens: int, in_host: bool) -> Store:
    """A layer's store with `tokens` random rows; raises CapacityError where there is no memory for it."""
    need = 2 * info.batch * info.kv_heads * tokens * info.head_dim * info.dtype.itemsize
    refuse(need, torch.device("cpu") if in_host else info.device, f"a store of {tokens} tokens")
    assert pipeline.allocate_store is not None
    assert pipeline.update is not None
    store = pipeline.allocate_store(info, tokens)
    for start in range(0, tokens, CHUNK):
        size = (2, info.batch, info.kv_heads, min(CHUNK, tokens - start), info.head_dim)
        keys, values = torch.randn(size, dtype=info.dtype, device=info.device)
        pipeline.update(keys, values, store, list(range(info.batch)))
    return store
