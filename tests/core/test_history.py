"""A prompt that is read over the store: each chunk's attention, what stays on the device, and who decides."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import INFO, Memory, pipelines
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pariskv import CodeField, Codes, LayerInfo, Prefill, Register, Retriever, hookimpl, memory
from pariskv import history as module
from pariskv.attention import dense_attention, merge, partial_attention, weaken_by_sinks
from pariskv.binding import LayerPipeline, bind
from pariskv.config import parse_config
from pariskv.decode import attend_layer
from pariskv.errors import CapacityError, ConfigError, ModelError
from pariskv.history import ReadAhead
from pariskv.layer import LayerState
from pariskv.memory import refuse_if_too_large
from pariskv.planner import Estimate, Need, Planner, estimate_layer
from pariskv.prompt import History
from pariskv.registry import Registry, Source
from pariskv.request import Request
from pariskv.types import TOKENS, Partial, Store, Tensors
from pariskv.window import Window

H, G, D = 2, 3, 16
CPU = torch.device("cpu")
REGISTRY = Registry.load(entry_points=False)


def layer_info(batch: int = 1, dtype: torch.dtype = torch.float64, **more: Any) -> LayerInfo:
    return LayerInfo(0, batch, H, G, D, dtype, CPU, D**-0.5, **more)


def pipeline(retriever: str = "exact", registry: Registry = REGISTRY, **layer: object) -> LayerPipeline:
    values = {"retriever": retriever, "top_k": 400, "candidates": 1.0, **layer}
    return bind(parse_config({"layers": {"default": values}}), 1, registry)[0]


def new_layer(
    window: Window, bound: LayerPipeline, info: LayerInfo, history: History = "store", new_tokens: int = 16
) -> LayerState:
    return LayerState(info, bound, window, Request(new_tokens=new_tokens, choose=lambda *sizes: history))


def causal_mask(pads: list[int], columns: int, newest: int) -> Tensor:
    """What transformers makes of left padding: bool [B, 1, newest, columns]."""
    column = torch.arange(columns)
    mask: Tensor = (column >= torch.tensor(pads)[:, None, None, None]) & (column <= column[-newest:, None])
    return mask


class Conversation:
    """Random turns of a ragged batch for one layer, and what dense attention over all of a row gives."""

    def __init__(self, layer: LayerState, pads: list[int], sinks: Tensor | None = None, seed: int = 0):
        self.layer, self.pads, self.sinks = layer, pads, sinks
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.empty(len(pads), H, 0, 2, D, dtype=torch.float64)
        self.held: list[int] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def read(self, columns: int, chunk: int) -> None:
        """One turn, every chunk's attention compared."""
        history, info = self.tokens.shape[2], self.layer.info
        turn = self.random(len(self.pads), H, columns, 2, D)
        if not history:
            for row, pad in enumerate(self.pads):
                turn[row, :, :pad] = math.nan  # padding is never looked at
        self.tokens = torch.cat((self.tokens, turn), dim=2)
        self.layer.request.prefilling = True
        for start in range(0, columns, chunk):
            stop = min(start + chunk, columns)
            new = turn[:, :, start:stop].to(info.dtype)
            self.layer.append(new[..., 0, :], new[..., 1, :])
            query = self.random(len(self.pads), H * G, stop - start, D).to(info.dtype)
            mask = causal_mask(self.pads, history + stop, stop - start) if any(self.pads) else None
            got = self.layer.attend_chunk(query, mask, self.sinks)
            self.compare(got, query, history + stop)
            assert self.layer.prompt is not None
            self.held.append(self.layer.prompt.nbytes)
        self.layer.request.prefilling = False
        self.layer.end_prefill()

    def compare(self, got: Tensor, query: Tensor, columns: int) -> None:
        info = self.layer.info
        for row, pad in enumerate(self.pads):
            new = min(columns - pad, query.shape[2])
            if new <= 0:
                assert torch.equal(got[row], torch.zeros_like(got[row]))
                continue
            tokens = self.tokens[row : row + 1, :, pad:columns].to(info.dtype)
            part = query[row : row + 1, :, query.shape[2] - new :]
            want = dense_attention(
                part, tokens[..., 0, :], tokens[..., 1, :], None, info.scaling, info.softcap, self.sinks
            )
            torch.testing.assert_close(got[row : row + 1, :, query.shape[2] - new :], want)
            assert torch.isfinite(got[row]).all()

    def decode(self, steps: int) -> None:
        """Tokens after it, whose attention has the whole history, too."""
        for _ in range(steps):
            self.layer.finish_step()
            token = self.random(len(self.pads), H, 1, 2, D)
            self.layer.append(token[..., 0, :], token[..., 1, :])
            self.tokens = torch.cat((self.tokens, token), dim=2)
            heads = self.random(len(self.pads), H, G, D)
            out, _ = attend_layer(self.layer, heads)
            for row, pad in enumerate(self.pads):
                keys, values = self.tokens[row, :, pad:].unbind(2)
                scores = heads[row] @ keys.transpose(-1, -2) * D**-0.5
                torch.testing.assert_close(out[row], torch.softmax(scores, -1) @ values)


WINDOWS = st.builds(
    Window,
    sink=st.integers(0, 5),
    local=st.integers(1, 6),
    update=st.integers(1, 6),
    dense_below=st.integers(0, 30),
)


@settings(max_examples=40, deadline=None)
@given(
    window=WINDOWS,
    columns=st.integers(1, 60),
    pads=st.lists(st.integers(0, 59), min_size=1, max_size=3),
    chunk=st.integers(1, 60),
    block=st.integers(1, 20),
    retriever=st.sampled_from(["exact", "pariskv"]),
)
def test_every_chunk_attends_to_exactly_the_tokens_before_it(
    window: Window, columns: int, pads: list[int], chunk: int, block: int, retriever: str
) -> None:
    """Ragged rows, any window, chunks and blocks of the store; then the decode steps, and a later turn."""
    pads = [min(pad, columns - 1) for pad in pads]
    talk = Conversation(new_layer(window, pipeline(retriever), layer_info(len(pads))), pads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        talk.read(columns, chunk)
        talk.decode(9)
        talk.read(11, 4)
        talk.decode(3)
    assert talk.layer.prefill_history == "store"


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_cap_and_attention_sinks_are_applied_once(softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.linspace(-1, 3, H * G, dtype=torch.float64) if with_sinks else None
    layer = new_layer(Window(2, 3, 4), pipeline(), layer_info(2, softcap=softcap))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 8)
        Conversation(layer, [0, 23], sinks).read(50, 7)


def test_parts_merge_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        query = torch.randn(2, H * G, 300, D, generator=generator).to(dtype)
        keys, values = torch.randn(2, 2, H, 900, D, generator=generator).to(dtype)
        for softcap in (None, 1.5):
            found = partial_attention(query, keys[:, :, 500:], values[:, :, 500:], 0.3, softcap, is_causal=True)
            for part in (slice(0, 100), slice(100, 101), slice(101, 500)):
                other = partial_attention(query, keys[:, :, part], values[:, :, part], 0.3, softcap)
                found = Partial(*merge(found, other))
            sinks = torch.randn(H * G, generator=generator).to(dtype)
            wide = (query.double(), keys.double(), values.double())
            want = dense_attention(*wide, None, 0.3, softcap, sinks.double())
            got = weaken_by_sinks(found.out, found.lse, sinks)
            # bfloat16 comes out of products in float32.
            atol = 1e-12 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_what_the_device_holds_does_not_grow_with_the_prompt(chunk: int) -> None:
    window, held = Window(4, 8, 8, dense_below=20), []
    for columns in (200, 900):
        talk = Conversation(new_layer(window, pipeline(), layer_info()), [0])
        talk.read(columns, chunk)
        held.append(max(talk.held))
    assert held[0] == held[1]
    row = 2 * H * D * 8
    assert held[0] <= row * max(4 + 8 + 8, 20)
    planned = estimate_layer(layer_info(), pipeline(), window, 900, 0, "store")
    assert held[0] <= planned.prompt == row * 20


def test_a_chunk_that_is_kept_whole_keeps_nothing_else_alive() -> None:
    layer = new_layer(Window(64, 8, 8), pipeline(), layer_info())
    fused = torch.randn(1, 9, 3, H, D, dtype=torch.float64).transpose(1, 3)
    layer.request.prefilling = True
    layer.append(fused[:, :, 1].contiguous(), fused[:, :, 2])
    layer.attend_chunk(torch.zeros(1, H * G, 9, D, dtype=torch.float64), None, None)
    prompt = layer.prompt
    assert isinstance(prompt, module.StreamedPrompt)
    for tensor in prompt.held[0]:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == 9 * H * D * 8


def test_a_later_turn_does_not_bring_the_history_back() -> None:
    layer = new_layer(Window(4, 8, 8), pipeline(), layer_info(2))
    talk = Conversation(layer, [0, 30])
    talk.read(250, 50)
    talk.decode(20)
    assert isinstance(layer.store, Store)
    read: list[int] = []
    original = layer.store.read
    layer.store.read = lambda row, start, stop: read.append(stop - start) or original(row, start, stop)  # type: ignore[method-assign, func-returns-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 64)
        talk.held.clear()
        talk.read(60, 25)
    assert max(talk.held) <= 2 * (2 * H * D * 8) * (4 + 8 + 8)
    assert max(read) == 64
    talk.decode(20)


def test_a_row_that_loses_or_finds_tokens_between_chunks_is_refused() -> None:
    layer = new_layer(Window(2, 3, 4), pipeline(), layer_info(2))
    talk = Conversation(layer, [0, 5])
    layer.request.prefilling = True
    for columns, pads, message in ((20, [0, 5], ""), (27, [0, 25], r"row 1 held 15 tokens, and with a chunk of 7")):
        newest = columns - layer.columns
        new = talk.random(2, H, newest, D)
        layer.append(new, new)
        query = talk.random(2, H * G, newest, D)
        if not message:
            layer.attend_chunk(query, causal_mask(pads, columns, newest), None)
            continue
        with pytest.raises(ModelError, match=message):
            layer.attend_chunk(query, causal_mask(pads, columns, newest), None)


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("pads", [[0, 0], [0, 6]])
def test_a_mask_that_is_not_causal_is_refused_and_not_ignored(as_float: bool, pads: list[int]) -> None:
    talk = Conversation(new_layer(Window(2, 3, 4), pipeline(), layer_info(2)), pads)
    mask = causal_mask(pads, 20, 20)
    mask[1, 0, 9, 10] = True  # as between the parts of an image
    layer = talk.layer
    layer.request.prefilling = True
    new = talk.random(2, H, 20, D)
    layer.append(new, new)
    given_mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if as_float else mask
    with pytest.raises(ModelError, match=r"another mask.*prefill\.history=buffer"):
        layer.attend_chunk(talk.random(2, H * G, 20, D), given_mask, None)


def test_what_a_query_of_padding_may_see_is_of_no_interest() -> None:
    mask = causal_mask([0, 6], 20, 20)
    mask[1, 0, :6] = True
    module.refuse_unless_causal(mask, [0, 6], 20)
    mask[1, 0, 6, 5] = True
    with pytest.raises(ModelError, match="another mask"):
        module.refuse_unless_causal(mask, [0, 6], 20)


# Formats that learn from the prompt, layers without a store


class Centred(Retriever):
    """Codes that are the keys less the prompt's mean, by statistics of its queries."""

    format = "centred"
    needs = frozenset({"query_moment", "recent_queries"})

    def __init__(self) -> None:
        self.views: list[tuple[list[int], Tensor, Tensor]] = []

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity, keys=CodeField((TOKENS, D), torch.float64))

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        assert prefill.query_moment is not None
        assert prefill.recent_queries is not None
        self.views.append((prefill.lengths, prefill.query_moment.clone(), prefill.recent_queries.clone()))
        mean = torch.zeros(layer.batch, H, 1, D, dtype=torch.float64)
        for row, n in enumerate(prefill.lengths):
            for keys, _ in prefill.blocks(row):
                mean[row, :, 0] += keys.sum(1) / n
        return {"mean": mean}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"keys": keys - state["mean"]}


def offering(made: Centred) -> Registry:
    @hookimpl
    def register_retrievers(register: Register) -> None:
        register("centred", lambda: made)

    registry = Registry.load(entry_points=False)
    registry._add(Source("centred", "tests", "0"), lambda: SimpleNamespace(register_retrievers=register_retrievers))
    return registry


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_format_that_fits_sees_the_same_either_way(chunk: int) -> None:
    found = []
    for history, size in (("buffer", 100), ("store", chunk)):
        made = Centred()
        bound = pipeline("exact", offering(made), encode="centred")
        layer = new_layer(Window(2, 3, 4, dense_below=10), bound, layer_info(2), history)  # type: ignore[arg-type]
        talk = Conversation(layer, [0, 40])
        whole = talk.random(2, H * G, 100, D)
        tokens = talk.random(2, H, 100, 2, D)
        layer.request.prefilling = True
        for start in range(0, 100, size):
            stop = min(start + size, 100)
            layer.append(tokens[:, :, start:stop, 0], tokens[:, :, start:stop, 1])
            layer.attend_chunk(whole[:, :, start:stop], causal_mask(talk.pads, stop, stop - start), None)
        layer.request.prefilling = False
        layer.end_prefill()
        assert len(made.views) == 1
        found.append((made.views[0], layer.codes["centred"]["keys"], layer.codes["exact"]["keys"], layer.store))
    (view, centred, exact, store), (other, *codes, other_store) = found
    assert view[0] == other[0] == [92, 52]
    assert torch.equal(view[1], other[1])
    assert torch.equal(view[2], other[2])
    for row, zone in enumerate(view[0]):
        assert torch.equal(centred[row, :, :zone], codes[0][row, :, :zone])
        assert torch.equal(exact[row, :, :zone], codes[1][row, :, :zone])
        for one, two in zip(store.read(row, 0, zone), other_store.read(row, 0, zone), strict=True):
            assert torch.equal(one, two)


def test_a_layer_without_a_store_keeps_its_buffer() -> None:
    layer = new_layer(Window(2, 3, 4), pipeline("dense"), layer_info())
    talk = Conversation(layer, [0])
    talk.read(60, 7)
    assert layer.prefill_history == "buffer"
    assert max(talk.held) >= 60 * 2 * H * D * 8
    talk.decode(5)


# Reading ahead


class Recorded(Store):
    """Says what was read, and which blocks are still alive."""

    def __init__(self) -> None:
        self.capacity, self.length = 100, [100]
        self.spans: list[tuple[int, int]] = []
        self.blocks: list[weakref.ref[Tensor]] = []
        self.most = 0

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        self.spans.append((start, stop))
        keys, values = torch.full((1, stop - start, 4), float(start)), torch.zeros(1, stop - start, 4)
        self.blocks += [weakref.ref(keys), weakref.ref(values)]
        self.most = max(self.most, self.alive)
        return keys, values

    @property
    def alive(self) -> int:
        """Blocks of which keys or values are still there."""
        return sum(any(one() is not None for one in self.blocks[i : i + 2]) for i in range(0, len(self.blocks), 2))

    def grow(self, capacity: int) -> None: ...

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        return 0


def test_the_next_block_is_read_before_the_last_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 32)
    store = Recorded()
    blocks = ReadAhead(store, 0, 100, CPU)
    assert store.spans == [(0, 32)]
    seen = []
    for keys, values in blocks:
        seen.append((float(keys[0, 0, 0]), keys.shape[1], len(store.spans)))
        assert store.alive <= 2
        del keys, values
    assert seen == [(0, 32, 2), (32, 32, 3), (64, 32, 4), (96, 4, 4)]
    assert store.spans == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert store.alive == 0


def test_nothing_is_read_of_an_empty_zone() -> None:
    assert list(ReadAhead(None, 0, 0, CPU)) == []


def test_attention_over_the_zone_holds_two_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)
    prompt = module.StreamedPrompt(LayerInfo(0, 1, 1, 1, 4, torch.float32, CPU, 0.5), 0)
    store = Recorded()
    prompt.resume(100, [(torch.zeros(1, 0, 4), torch.zeros(1, 0, 4))], [100], store)
    alive = []

    def attending(*arguments: Any, **more: Any) -> Partial:
        alive.append(store.alive)
        return partial_attention(*arguments, **more)

    monkeypatch.setattr(module, "partial_attention", attending)
    prompt.append(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    prompt.note_mask(None)
    prompt.attend(torch.ones(1, 1, 3, 4), None, None)
    assert alive == [1] + [2] * 12 + [1]
    assert store.most == 2  # while the next one is read, too


# Who decides


class Hosted(Memory):
    host_resident = True


GPU = torch.device("cuda")
ROW = 2 * 4 * 4  # key and value, D = 4, float32
WINDOW = Window(sink=4, local=8, update=8)


def planner(wanted: str, layers: int = 3, dense: int = 0, device: torch.device = GPU) -> Planner:
    stages = {f"{index}": {"retriever": "dense"} for index in range(dense)}
    bound = pipelines(str(stages), "store: host", layers, retrievers={"host": Hosted})
    windows = dict.fromkeys(bound, WINDOW)
    config = parse_config({"prefill": {"history": wanted}})
    return Planner(config, lambda index, batch: replace(INFO, batch=batch, device=device), bound, windows, device)


def test_the_estimate_knows_both_ways() -> None:
    plan = planner("auto", layers=2, dense=1)
    buffered, streamed = (plan.estimate(1, 100, 12, history).held for history in ("buffer", "store"))
    assert buffered.prompt == 2 * 100 * ROW
    assert streamed.prompt == (100 + 4 + 8 + 8) * ROW  # a dense layer has nowhere else to keep it
    assert replace(streamed, prompt=buffered.prompt) == buffered
    short = planner("auto", layers=1)
    assert short.estimate(1, 10, 2, "store").held.prompt == 12 * ROW  # with what may be decoded before a later turn
    assert short.estimate(1, 10, 2, "buffer").held.prompt == 10 * ROW
    below = estimate_layer(INFO, pipelines()[0], Window(4, 8, 8, dense_below=60), 100, 12, "store")
    assert below.prompt == 60 * ROW


@pytest.mark.parametrize(("free", "way"), [(1.0, "buffer"), (0.999, "store"), (0.01, "store"), (None, "buffer")])
def test_auto_keeps_a_buffer_where_it_fits(free: float | None, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner("auto")
    need = plan.estimate(2, 1000, 12, "buffer").peak
    monkeypatch.setattr(memory, "available_bytes", lambda device: None if free is None else int(free * need))
    assert plan.history(2, 1000, 12) == way
    assert plan.estimate(2, 1000, 12) == plan.estimate(2, 1000, 12, way)  # type: ignore[arg-type]
    for wanted in ("buffer", "store"):
        assert planner(wanted).history(2, 1000, 12) == wanted


def test_a_request_is_refused_only_where_neither_way_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner("auto")
    buffered, streamed = (plan.estimate(1, 1000, 12, history) for history in ("buffer", "store"))
    assert streamed.peak < buffered.peak
    for free, fits in ((streamed.peak, True), (streamed.peak - 1, False)):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free if device == GPU else 10**9)
        need = plan.estimate(1, 1000, 12)
        assert need == streamed
        if fits:
            refuse_if_too_large(need, GPU)
            continue
        with pytest.raises(CapacityError, match="not enough memory: the cache needs"):
            refuse_if_too_large(need, GPU)


def test_a_buffer_that_was_asked_for_and_does_not_fit_is_refused_with_the_other_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10)
    with pytest.raises(CapacityError, match=r"free on cuda; set prefill\.history=auto, shorten the prompt"):
        refuse_if_too_large(Need(Estimate(prompt=11), 11), GPU, "buffer")


def test_all_layers_read_a_prompt_in_one_way_and_a_later_turn_is_decided_anew() -> None:
    asked: list[tuple[int, ...]] = []
    answers: dict[int, History] = {40: "buffer", 60: "store"}

    def choose(*sizes: int) -> History:
        asked.append(sizes)
        return answers[sizes[1]]

    request = Request(prompt_tokens=40, new_tokens=7, choose=choose)
    layers = [LayerState(layer_info(), pipeline(), Window(2, 3, 4), request) for _ in range(2)]
    talks = [Conversation(layer, [0]) for layer in layers]
    for talk in talks:
        talk.read(40, 15)
    assert asked == [(1, 40, 7)]
    assert [layer.prefill_history for layer in layers] == ["buffer"] * 2
    for talk in talks:
        talk.read(20, 20)
    assert asked == [(1, 40, 7), (1, 60, 7)]
    assert [layer.prefill_history for layer in layers] == ["store"] * 2


def test_torchs_own_pool_and_limit_count_as_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"mem_get_info": (10, 100), "memory_allocated": 20, "memory_reserved": 50}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for fraction, free in ((1.0, 40), (0.5, 30), (0.1, 0)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, f=fraction: f)
        assert memory.available_bytes(GPU) == free


def test_another_way_is_refused_by_name(tmp_path: Path) -> None:
    assert parse_config({}).prefill.history == "auto"
    for value in ("buffer", "store"):
        assert parse_config({}, [f"prefill.history={value}"]).prefill.history == value
    with pytest.raises(ConfigError, match=r"prefill\.history: got 'disk'.*wanted auto \| buffer \| store"):
        parse_config({"prefill": {"history": "disk"}})
