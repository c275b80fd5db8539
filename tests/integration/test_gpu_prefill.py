"""On a CUDA device: a prompt read over the store gives what a buffer gives, in two blocks of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import language_model, prompt, tiny_model
from torch import Tensor

from pariskv import LayerInfo, ParisCache, attention, history, parse_config
from pariskv.attention import partial_attention
from pariskv.binding import bind
from pariskv.decode import Batch, prefill
from pariskv.history import ReadAhead
from pariskv.layer import LayerState
from pariskv.prompt import History
from pariskv.registry import Registry
from pariskv.request import Request
from pariskv.types import Partial
from pariskv.window import Window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
H, G, D = 4, 2, 64
WINDOW = Window(16, 64, 64)
SLEEP = 2_000_000
"""Clock cycles, about a millisecond: more than a small copy or attention takes."""


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def new_layer(way: History, store: str, batch: int, dtype: torch.dtype, tokens: int, **more: Any) -> LayerState:
    layers = {"default": {"retriever": "exact", "top_k": 32, "candidates": 0.5}}
    bound = bind(parse_config({"store": store, "layers": layers}), 1, Registry.load())[0]
    info = LayerInfo(0, batch, H, G, D, dtype, gpu(), D**-0.5, **more)
    return LayerState(info, bound, WINDOW, Request(tokens, choose=lambda *sizes: way, prefilling=True))


def chunks(layer: LayerState, pads: list[int], tokens: int, chunk: int) -> Iterator[Tensor]:
    """The outputs of a prompt's chunks for queries that are real, the same for layers of one dtype and batch."""
    info = layer.info
    random = torch.Generator(info.device).manual_seed(0)
    size = (len(pads), tokens, H * (G + 2), D)
    query, keys, values = (
        torch.randn(size, generator=random, dtype=torch.float32, device=info.device)
        .to(info.dtype)
        .transpose(1, 2)
        .split((H * G, H, H), dim=1)
    )
    column = torch.arange(tokens, device=info.device)
    first = torch.tensor(pads, device=info.device)[:, None, None, None]
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        mask = (column[:stop] >= first) & (column[:stop] <= column[start:stop, None]) if any(pads) else None
        layer.append(keys[:, :, start:stop], values[:, :, start:stop])
        out = layer.attend_chunk(query[:, :, start:stop], mask, None)
        yield out.masked_fill(~(column[start:stop, None] >= first), 0)


@pytest.mark.parametrize(
    ("dtype", "softcap", "tolerance"),
    # The output is rounded once more for each block that it is merged of.
    [
        (torch.bfloat16, None, 2e-2),
        (torch.float16, None, 2e-3),
        (torch.float32, None, 1e-5),
        (torch.bfloat16, 5.0, 2e-2),
    ],
)
@pytest.mark.parametrize("store", ["uva", "resident"])
@pytest.mark.parametrize("pads", [[0], [0, 777]])
def test_chunks_over_the_store_attend_as_over_a_buffer(
    dtype: torch.dtype, softcap: float | None, tolerance: float, store: str, pads: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(history, "BLOCK", 200)
    layers = [new_layer(way, store, len(pads), dtype, 2500, softcap=softcap) for way in ("buffer", "store")]  # type: ignore[arg-type]
    for want, got in zip(*(chunks(layer, pads, 2500, 300) for layer in layers), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    assert layers[1].zones[0] == WINDOW.zone(2500)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention_and_the_definition_agree(
    dtype: torch.dtype, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(1, H * G, 300, 128, generator=random, device="cuda").to(dtype)
    rows = torch.randn(1, 1000, H, 2, 128, generator=random, device="cuda").to(dtype).transpose(1, 2)
    keys, values = rows.unbind(3)  # as a store has them
    assert attention._flash_takes(query, keys, values)
    flash = partial_attention(query, keys, values, 0.2, is_causal=is_causal)
    monkeypatch.setattr(attention, "_flash_takes", lambda *tensors: False)
    defined = partial_attention(query, keys, values, 0.2, is_causal=is_causal)
    assert (flash.out.dtype, flash.lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(flash.lse, defined.lse, rtol=0, atol=1e-3)
    torch.testing.assert_close(flash.out.float(), defined.out, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("slow", ["read", "attention"])
def test_neither_reads_nor_attention_run_ahead_of_the_other(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is used before it has arrived, or whose memory is written while it is in use, gives other values."""
    monkeypatch.setattr(history, "BLOCK", 256)
    want = list(chunks(new_layer("buffer", "uva", 1, torch.float32, 3000), [0], 3000, 500))
    layer = new_layer("store", "uva", 1, torch.float32, 3000)

    def attending(*arguments: Any, **more: Any) -> Partial:
        if slow == "attention":
            torch.cuda._sleep(SLEEP)
        return partial_attention(*arguments, **more)

    monkeypatch.setattr(history, "partial_attention", attending)
    started = ReadAhead._start

    def reading(self: ReadAhead) -> Any:
        if slow == "read" and self._stream is not None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(SLEEP)
        return started(self)

    monkeypatch.setattr(ReadAhead, "_start", reading)
    for one, other in zip(chunks(layer, [0], 3000, 500), want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_next_block_is_read_while_one_is_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time: reads and attention of a millisecond each take less than their sum."""
    monkeypatch.setattr(history, "BLOCK", 256)
    layer = new_layer("store", "uva", 1, torch.float32, 8192)
    for _ in chunks(layer, [0], 8192, 2048):
        pass
    assert layer.store is not None

    def milliseconds(reads: int, uses: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        read = layer.store.read  # type: ignore[union-attr]

        def slowly(*arguments: int) -> Any:
            torch.cuda._sleep(reads)
            return read(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer.store, "read", slowly)
            torch.cuda.synchronize()
            begin.record()
            for keys, values in ReadAhead(layer.store, 0, 256 * 24, gpu()):
                torch.cuda._sleep(uses)
                del keys, values
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end)

    milliseconds(SLEEP, SLEEP)
    apart = milliseconds(SLEEP, 0) + milliseconds(0, SLEEP)
    assert milliseconds(SLEEP, SLEEP) < 0.75 * apart


def test_a_long_zone_takes_the_memory_of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BLOCK", 1024)
    layer = new_layer("store", "uva", 1, torch.bfloat16, 65536)
    for _ in chunks(layer, [0], 65536, 8192):
        pass
    block = 1024 * H * 2 * D * 2
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for keys, values in ReadAhead(layer.store, 0, layer.zones[0], gpu()):
        torch.cuda._sleep(SLEEP // 20)
        del keys, values
    torch.cuda.synchronize()
    assert layer.zones[0] > 60 * 1024
    assert torch.cuda.max_memory_allocated() - before <= 2 * block


def test_a_bfloat16_model_reads_over_the_store_with_less_memory() -> None:
    """The logits are as far from float32's as those of the buffer are."""
    sizes = {"num_hidden_layers": 12, "num_key_value_heads": 6, "max_position_embeddings": 65536}
    ids = prompt(24_000).cuda()
    logits, peaks = {}, {}
    for name, dtype, way in (
        ("exact", torch.float32, "buffer"),
        ("buffer", torch.bfloat16, "buffer"),
        ("store", torch.bfloat16, "store"),
    ):
        model = tiny_model("llama", torch.float32, **sizes).to(dtype).cuda()
        cache = ParisCache(model, parse_config({"prefill": {"history": way}, "window": {"dense_below": 0}}))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        logits[name] = prefill(language_model(model), cache, Batch(ids), 20, 2048).float()
        peaks[name] = torch.cuda.max_memory_allocated()
        assert cache.request.prefill_history == way
        del cache
    errors = {name: float((logits[name] - logits["exact"]).norm()) for name in ("buffer", "store")}
    assert errors["store"] <= 1.5 * errors["buffer"]
    kept = 12 * 24_000 * 6 * 16 * 2 * 2
    assert peaks["store"] < peaks["buffer"] - 0.75 * kept
