"""SnapKV: votes against a loop over queries and positions, and what a request keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_plugins import snapkv as snapkv_module
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.resident import Resident
from pariskv_plugins.snapkv import Options, SnapKV, mean_attention
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor

from pariskv.errors import ConfigError, PluginContractError
from pariskv.testing import check_retriever
from pariskv.types import RECENT_QUERIES, LayerInfo, Prefill, Query
from tests.plugins.driving import budget_of, config_of, filled, generated, layer_of, needs_gpu, padded
from tests.plugins.test_graph_safe import no_host


class Prompt(Prefill):
    """A prompt's zone in blocks of 7 tokens; rows have `real` queries each, and zeros before them."""

    def __init__(self, layer: LayerInfo, lengths: list[int], real: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (layer.batch, layer.kv_heads)
        self.lengths = lengths
        self.keys = torch.randn(*shape, max(lengths), layer.head_dim, generator=generator)
        self.recent_queries = torch.randn(*shape, layer.group, RECENT_QUERIES, layer.head_dim, generator=generator)
        for row, count in enumerate(real):
            self.recent_queries[row, :, :, : RECENT_QUERIES - count] = 0
            self.keys[row, :, lengths[row] :] = float("nan")
        self.query_moment = self.rotary = self.store = None

    def blocks(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.lengths[row], 7):
            keys = self.keys[row, :, start : min(start + 7, self.lengths[row])]
            yield keys, keys

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        raise AssertionError

    def pre_rope_blocks(self, row: int) -> Iterator[Tensor]:
        raise AssertionError


LENGTHS, REAL = [40, 9, 0], [RECENT_QUERIES, 5, 0]
LAYER = layer_of(3, 2, 3, 16)


def votes_by_hand(queries: Tensor, keys: Tensor, layer: LayerInfo, options: Options) -> list[float]:
    """Votes of one key/value head: queries [G, W, D] without padding, keys [N, D]."""
    tokens, reach = len(keys), options.kernel // 2
    pooled = []
    for head in queries.double():
        mean = torch.zeros(tokens, dtype=torch.float64)
        for query in head:
            scores = torch.stack([query @ key for key in keys.double()]) * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            mean += scores.softmax(0) / len(head)
        near = [mean[max(0, n - reach) : n + reach + 1] for n in range(tokens)]
        pooled.append([float(part.max() if options.pooling == "max" else part.mean()) for part in near])
    return [sum(votes) / len(pooled) for votes in zip(*pooled, strict=True)]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    "options",
    [Options(), Options(pooling="mean"), Options(window=64, kernel=1), Options(window=1, kernel=3), Options(kernel=15)],
)
def test_votes_are_those_of_a_loop_over_queries_and_positions(options: Options, softcap: float | None) -> None:
    layer, prompt = replace(LAYER, softcap=softcap), Prompt(LAYER, LENGTHS, REAL)
    snapkv = SnapKV(options)
    assert prompt.recent_queries is not None
    for row, head in itertools.product(range(2), range(2)):
        voters = min(options.window, REAL[row])
        queries, keys = prompt.recent_queries[row, head, :, -voters:], prompt.keys[row, head, : LENGTHS[row]]
        want = torch.tensor(votes_by_hand(queries, keys, layer, options))
        torch.testing.assert_close(snapkv.votes(layer, prompt, row)[head], want, rtol=1e-4, atol=1e-6)


def test_what_is_kept_are_the_most_voted_in_their_order_then_nothing() -> None:
    snapkv, prompt = SnapKV(Options(keep=12, kernel=1)), Prompt(LAYER, LENGTHS, REAL)
    kept = snapkv.fit(LAYER, prompt)["kept"]
    assert kept.shape == (3, 2, 12)
    assert kept.dtype == torch.int32
    for row, head in itertools.product(range(2), range(2)):
        votes = snapkv.votes(LAYER, prompt, row)[head]
        best = votes.argsort(descending=True, stable=True)[:12].tolist()
        assert kept[row, head].tolist() == best + [-1] * (12 - len(best))
    assert kept[2].tolist() == [[-1] * 12] * 2


def test_the_neighbours_of_an_important_token_are_kept_with_it() -> None:
    layer, prompt = layer_of(1, 1, 1, 16), Prompt(layer_of(1, 1, 1, 16), [40], [64])
    assert prompt.recent_queries is not None
    prompt.recent_queries[:] = 1.0
    prompt.keys[:] = 0.0
    prompt.keys[0, 0, 20] = 5.0
    kept = SnapKV(Options(keep=7)).fit(layer, prompt)["kept"]
    assert sorted(kept[0, 0].tolist()) == [*range(17, 24)]
    assert 17 not in SnapKV(Options(keep=7, kernel=3)).fit(layer, prompt)["kept"]


def test_queries_before_the_window_have_no_vote() -> None:
    snapkv, prompt = SnapKV(Options(window=4)), Prompt(LAYER, LENGTHS, REAL)
    before = snapkv.fit(LAYER, prompt)["kept"]
    assert prompt.recent_queries is not None
    prompt.recent_queries[:, :, :, :-4] *= -3
    assert torch.equal(snapkv.fit(LAYER, prompt)["kept"], before)
    prompt.recent_queries[:, :, :, -4:] *= -3
    assert not torch.equal(snapkv.fit(LAYER, prompt)["kept"], before)


# The steps


def query_of(snapkv: SnapKV, heads: Tensor, state: Any) -> Query:
    return Query(heads, snapkv.encode_query(heads, state), 0.25)


@pytest.mark.parametrize(("keep", "width"), [(20, 6), (4, 6), (6, 6)])
def test_every_step_takes_the_same_tokens_whatever_it_asks(keep: int, width: int) -> None:
    snapkv, prompt = SnapKV(Options(keep=keep)), Prompt(LAYER, LENGTHS, REAL)
    state = snapkv.fit(LAYER, prompt)
    codes = filled(snapkv, LAYER, prompt.keys, LENGTHS, state)
    assert codes.nbytes == 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        query = query_of(snapkv, torch.randn(3, 2, 3, 16, generator=generator), state)
        got = snapkv.coarse_select(query, codes, budget_of([6, 5, 0], width)).indices
        assert got.dtype == torch.int32
        for row, count in enumerate((6, 5, 0)):
            best = state["kept"][row, :, : min(count, keep)]
            assert torch.equal(got[row, :, : best.shape[1]], best)
            assert bool((got[row, :, best.shape[1] :] == -1).all())


def test_a_query_that_it_did_not_encode_is_refused() -> None:
    snapkv = SnapKV()
    codes = snapkv.allocate_codes(LAYER, 8)
    with pytest.raises(PluginContractError, match="pass what snapkv's encode_query returned"):
        snapkv.coarse_select(Query(torch.zeros(3, 2, 3, 16), None, 1.0), codes, budget_of([1, 1, 1], 1))


def test_a_step_never_asks_the_host() -> None:
    snapkv, resident, prompt = SnapKV(Options(keep=4)), Resident(), Prompt(LAYER, LENGTHS, REAL)
    state, heads = snapkv.fit(LAYER, prompt), torch.ones(3, 2, 3, 16)
    codes, store = filled(snapkv, LAYER, prompt.keys, LENGTHS, state), resident.allocate_store(LAYER, 40)
    budget, slots = budget_of([6, 5, 0], 6), torch.zeros(3, 2, 6, 2, 16)

    def step() -> Tensor:
        selection = snapkv.coarse_select(query_of(snapkv, heads, state), codes, budget)
        return resident.fetch(selection, store, slots).valid

    assert snapkv.graph_safe
    warmed_up = step()
    with no_host():
        again = step()
    assert torch.equal(again, warmed_up)


def test_pariskv_reranks_what_is_kept() -> None:
    snapkv, paris, prompt = SnapKV(Options(keep=20)), ParisPaper(), Prompt(LAYER, LENGTHS, REAL)
    state, heads = snapkv.fit(LAYER, prompt), torch.randn(3, 2, 3, 16, generator=torch.Generator().manual_seed(1))
    codes = filled(snapkv, LAYER, prompt.keys, LENGTHS, state)
    kept = snapkv.coarse_select(query_of(snapkv, heads, state), codes, budget_of([30, 9, 0], 30))
    reading = paris.allocate_codes(LAYER, 40)
    for row, length in enumerate(LENGTHS):
        block = prompt.keys[row : row + 1, :, :length]
        reading.append([row], [0], paris.encode(block, block, {}), length)
    reading.length.copy_(torch.tensor(LENGTHS, dtype=torch.int32))
    final = paris.rerank(Query(heads, paris.encode_query(heads, {}), 0.25), kept, reading, 5).indices
    for row, head in itertools.product(range(3), range(2)):
        chosen = set(final[row, head].tolist()) - {-1}
        assert len(chosen) == (5 if LENGTHS[row] else 0)
        assert chosen <= set(state["kept"][row, head].tolist())


# The contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_contract_with_fewer_positions_than_a_step_takes(dtype: torch.dtype) -> None:
    check_retriever(SnapKV(Options(keep=10, pooling="mean")), dtype=dtype, lengths=(150, 16, 0), top_k=20)


def test_votes_of_the_steps_own_query_without_pooling_are_the_oracle() -> None:
    check_retriever(SnapKV(Options(kernel=1)), recall_floor=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "snapkv: keep=0; set it to an integer from 1"),
        ({"keep": 0.1}, r"snapkv: keep=0\.1; set it to an integer from 1"),
        ({"window": 65}, "snapkv: window=65; set it to at most 64"),
        ({"window": True}, "snapkv: window=True; set it to an integer from 1"),
        ({"kernel": 6}, "snapkv: kernel=6; set it to an odd number"),
        ({"pooling": "avg"}, "snapkv: pooling='avg'; set it to one of max, mean"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SnapKV(Options(**options))


# In a model

NEW = 40


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("length", [4, 13, 90])
def test_a_budget_that_covers_the_prompt_is_dense_attention(family: str, length: int) -> None:
    model, ids = tiny_model(family), prompt(length)
    want, _ = dense_generate(model, ids, NEW)
    got, cache = generated(model, ids, config_of("snapkv", top_k=400), NEW)
    assert torch.equal(got, want)
    layer = cache.request.layers[1]
    assert layer.zones == [max(0, length - 12) // 8 * 8], "generated tokens stay in the dense part"
    assert layer.lengths == [length + NEW - 1]


def test_each_step_attends_to_the_kept_tokens_and_to_all_generated_ones() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    got, cache = generated(model, ids, config_of("snapkv", {"keep": 6}, top_k=10), NEW)
    layer = cache.request.layers[1]
    assert layer.selected[0, :, :6].tolist() == [[NEW - 1] * 6] * 2
    assert int(layer.selected[0, :, 6:].sum()) == 0
    assert layer.device is not None
    assert int(layer.device.steady.sum()) == 90 - 72 + NEW - 1
    dense, _ = dense_generate(model, ids, NEW)
    assert not torch.equal(got, dense), "a budget that loses something, or the test shows nothing"


def test_the_models_last_queries_decide_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), prompt(90)
    options = {"keep": 10, "kernel": 3, "window": 8}
    seen: list[Prefill] = []

    def spy(layer: LayerInfo, prefill: Prefill, row: int, window: int) -> Tensor:
        seen.append(prefill)
        return mean_attention(layer, prefill, row, window)

    monkeypatch.setattr(snapkv_module, "mean_attention", spy)
    _, cache = generated(model, ids, config_of("snapkv", options, top_k=10), 3)
    assert len(seen) == 3
    for index, prefill in enumerate(seen):
        layer = cache.request.layers[index]
        assert prefill.recent_queries is not None
        keys = torch.cat([keys for keys, _ in prefill.blocks(0)], dim=1)
        assert keys.shape[1] == layer.zones[0]
        for head in range(2):
            queries = prefill.recent_queries[0, head, :, -8:]
            votes = torch.tensor(votes_by_hand(queries, keys[head], layer.info, Options(**options)))
            kept = layer.zone.states["it"]["kept"][0, head].tolist()
            torch.testing.assert_close(votes[kept], votes.topk(10).values, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("chunk", [None, 23])
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(chunk: int | None) -> None:
    model, rows = tiny_model("llama"), [prompt(n, seed=n) for n in (3, 41, 70)]
    config = config_of("snapkv", {"keep": 8, "kernel": 3}, top_k=8)
    ids, mask = padded(rows)
    together, _ = generated(model, ids, config, NEW, mask, chunk)
    for row, alone in enumerate(rows):
        assert torch.equal(together[row], generated(model, alone, config, NEW)[0][0]), f"row {row}"


def test_an_exact_rerank_of_everything_kept_is_dense_attention() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    want, _ = dense_generate(model, ids, NEW)
    config = config_of("snapkv", rerank="exact", candidates=1.0, top_k=400)
    got, cache = generated(model, ids, config, NEW)
    assert torch.equal(got, want)
    assert sorted(cache.request.layers[1].codes) == ["exact", "it"]


@pytest.mark.gpu
@needs_gpu
def test_captured_steps_on_the_device_generate_what_the_cpu_does() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    config = config_of("snapkv", {"keep": 8}, top_k=8)
    want, _ = generated(model, ids, config, NEW)
    assert torch.equal(generated(model.cuda(), ids.cuda(), config, NEW)[0], want)
