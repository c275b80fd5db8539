"""StreamingLLM: nothing but sink and ring is ever attended, and a store that keeps nothing says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_plugins.resident import Resident
from pariskv_plugins.window import Evict, EvictedRows, Window
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache
from pariskv.config import Config, PrefillConfig
from pariskv.errors import BindingError, PluginContractError
from pariskv.hookspecs import hookimpl
from pariskv.testing import check_retriever
from pariskv.types import Codes, Query, Selected, Selection, Store
from tests.plugins.driving import LOCAL, SINK, U, budget_of, config_of, generated, layer_of, needs_gpu, padded
from tests.plugins.test_graph_safe import no_host

NEW = 40


def evicting(config: Config) -> Config:
    return replace(config, store="evict")


# The contract


def step(window: Window, store: Store, fetch: Any) -> Selected:
    layer = layer_of(2, 3, 2, 64)
    query, codes = Query(torch.zeros(2, 3, 2, 64), None, 1.0), Codes.empty(layer, 16)
    selection = window.rerank(query, window.coarse_select(query, codes, budget_of([8, 3], 8)), codes, 5)
    assert selection.indices.shape == (2, 3, 0)
    selected: Selected = fetch(selection, store, torch.zeros(2, 3, 8, 2, 64)[:, :, :0])
    return selected


@pytest.mark.parametrize("owner", [Resident, Evict])
def test_a_step_fetches_nothing_and_never_asks_the_host(owner: type) -> None:
    stores, window = owner(), Window()
    store = stores.allocate_store(layer_of(2, 3, 2, 64), 16)
    assert window.graph_safe
    assert stores.graph_safe
    step(window, store, stores.fetch)
    with no_host():
        selected = step(window, store, stores.fetch)
    assert selected.valid.shape == (2, 3, 0)
    assert selected.valid.dtype == torch.bool


def test_evicted_rows_are_counted_and_take_no_memory() -> None:
    layer = layer_of(2, 3, 2, 64)
    store = Evict().allocate_store(layer, 100)
    Evict().update(torch.ones(1, 3, 60, 64), torch.ones(1, 3, 60, 64), store, [1])
    assert store.length == [0, 60]
    assert store.host_bytes == store.device_bytes == 0


def test_what_was_evicted_cannot_be_read_or_fetched() -> None:
    store = Evict().allocate_store(layer_of(2, 3, 2, 64), 100)
    with pytest.raises(BindingError, match=r"layer 0 has dropped the tokens 3 to 6 of row 1's zone.*a later turn"):
        store.read(1, 3, 7)
    selection = Selection(torch.full((2, 3, 4), -1, dtype=torch.int32))
    with pytest.raises(BindingError, match="4 tokens a head were selected, but this store keeps none"):
        Evict().fetch(selection, store, torch.zeros(2, 3, 4, 2, 64))


def test_another_store_than_its_own_is_refused() -> None:
    layer = layer_of(1, 1, 1, 64)
    with pytest.raises(BindingError, match="evict: got a ResidentStore"):
        Evict().update(torch.ones(1, 1, 1, 64), torch.ones(1, 1, 1, 64), Resident().allocate_store(layer, 8), [0])


class Silent(Evict):
    """Fetches rows that it does not have."""

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        return Selected(torch.zeros_like(selection.indices, dtype=torch.bool), selection.bias, selection.extra)


class Inventive(Evict):
    """Reads rows that it does not have."""

    @hookimpl
    def allocate_store(self, layer: Any, capacity: int) -> Store:
        class Zeros(EvictedRows):
            def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
                return torch.zeros(2, stop - start, 64), torch.zeros(2, stop - start, 64)

        return Zeros(layer, capacity)


@pytest.mark.parametrize(("retriever", "what"), [(Silent(), "fetch"), (Inventive(), "read")])
def test_a_store_that_keeps_nothing_and_hides_it_is_found(retriever: Evict, what: str) -> None:
    with pytest.raises(PluginContractError, match=f"the store holds no bytes, but {what} gave rows"):
        check_retriever(retriever)


# In a model


@pytest.mark.parametrize("top_k", [0, 100])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_it_attends_to_sink_and_ring_alone(family: str, top_k: int) -> None:
    model, ids = tiny_model(family), prompt(90)
    want, _ = generated(model, ids, config_of("pariskv", top_k=0), NEW)
    for config in (config_of("window", top_k=top_k), evicting(config_of("window", top_k=top_k))):
        got, cache = generated(model, ids, config, NEW)
        assert torch.equal(got, want)
        layer = cache.request.layers[1]
        assert layer.code_bytes == int(layer.selected.sum()) == 0
        assert SINK + LOCAL <= cache.request.attended_tokens_per_step <= SINK + LOCAL + U
    dense, _ = dense_generate(model, ids, NEW)
    assert not torch.equal(want, dense), "a window that loses something, or the test shows nothing"


def test_a_window_that_covers_everything_is_dense_attention() -> None:
    model, ids = tiny_model("llama"), prompt(60)
    config = config_of("window")
    config = evicting(replace(config, window=replace(config.window, local=100)))
    want, _ = dense_generate(model, ids, NEW)
    assert torch.equal(generated(model, ids, config, NEW)[0], want)


def test_generated_tokens_leave_the_ring_and_memory_stops_growing() -> None:
    model, config = tiny_model("llama"), evicting(config_of("window"))
    taken = []
    for new in (40, 400):
        _, cache = generated(model, prompt(90), config, new)
        layer = cache.request.layers[1]
        assert layer.device is not None
        assert layer.device.ring <= LOCAL + U
        assert layer.zones[0] >= 90 + new - 1 - SINK - LOCAL - U
        taken.append((cache.request.kv_device_bytes, cache.request.kv_host_bytes, cache.request.code_bytes))
    assert taken[0] == taken[1]


def test_a_ragged_batch_gives_each_row_what_it_gets_alone() -> None:
    model, rows = tiny_model("llama"), [prompt(n, seed=n) for n in (3, 41, 70)]
    ids, mask = padded(rows)
    config = evicting(config_of("window"))
    together, _ = generated(model, ids, config, NEW, mask)
    for row, alone in enumerate(rows):
        assert torch.equal(together[row], generated(model, alone, config, NEW)[0][0]), f"row {row}"


def test_among_other_layers_it_does_without_their_rerank_and_codes() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    config = config_of("pariskv", more={"1": {"retriever": "window"}}, candidates=0.5, top_k=10)
    _, cache = generated(model, ids, config, NEW)
    layers = cache.request.layers
    assert [int(layers[index].selected.sum()) > 0 for index in range(3)] == [True, False, True]
    assert layers[1].codes == {}
    assert layers[1].store is not None
    assert layers[1].store.length == layers[0].store.length  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("retriever", "message"),
    [("pariskv", "10 tokens a head were selected"), ("snapkv", "10 tokens a head were selected")],
)
def test_evict_refuses_a_retriever_that_needs_the_rows(retriever: str, message: str) -> None:
    with pytest.raises(BindingError, match=message):
        generated(tiny_model("llama"), prompt(90), evicting(config_of(retriever, top_k=10)), 3)


def chat(model: Any, cache: ParisCache, ids: Tensor) -> Tensor:
    out: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    return out


def test_a_later_turn_needs_a_store_that_keeps_rows() -> None:
    model, config = tiny_model("llama"), config_of("window")
    cache = ParisCache(model, config)
    turn = torch.cat((chat(model, cache, prompt(90)), prompt(20, seed=5)), dim=1)
    whole = chat(model, ParisCache(model, config), turn)
    assert torch.equal(chat(model, cache, turn)[:, :111], whole[:, :111])
    evicted = ParisCache(model, evicting(config))
    chat(model, evicted, prompt(90))
    with pytest.raises(BindingError, match="a later turn"):
        chat(model, evicted, turn)


def test_a_prompt_that_is_read_over_the_store_needs_its_rows() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    want, _ = generated(model, ids, config_of("window"), NEW)
    streamed = replace(config_of("window"), prefill=PrefillConfig(history="store"))
    assert torch.equal(generated(model, ids, streamed, NEW, chunk=20)[0], want)
    with pytest.raises(BindingError, match=r"prefill\.history=buffer"):
        generated(model, ids, evicting(streamed), NEW, chunk=20)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("store", ["auto", "evict"])
def test_captured_steps_on_the_device_generate_what_the_cpu_does(store: str) -> None:
    model, ids, config = tiny_model("llama"), prompt(90), replace(config_of("window"), store=store)
    want, _ = generated(model, ids, config, NEW)
    assert torch.equal(generated(model.cuda(), ids.cuda(), config, NEW)[0], want)
