"""ShadowKV against its definition: chunks scored one by one, keys by a plain SVD and a plain rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_plugins.exact import Exact
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.resident import Resident
from pariskv_plugins.shadowkv import Landmarks, Options, ShadowKV, make
from pariskv_plugins.shadowkv.lowrank import ShadowStore
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pariskv import ParisCache
from pariskv.attention import attend
from pariskv.errors import BindingError, ConfigError
from pariskv.integrations.rotary import rotary_of
from pariskv.registry import Registry
from pariskv.testing import check_retriever
from pariskv.types import Codes, LayerInfo, Prefill, Query, Selected, Selection, Store, WorkingSet
from tests.plugins.driving import LOCAL, SINK, budget_of, config_of, generated, layer_of, padded
from tests.plugins.test_graph_safe import no_host

LENGTHS = [200, 64, 0]
HEADS, GROUP, DIM, CHUNK = 2, 3, 16, 8
FULL = HEADS * DIM
NAN = float("nan")


class Rope:
    """A rotary embedding, written out: coordinate pairs (j, j + D/2) turn by position * base^(-2j/D)."""

    def turned(self, keys: Tensor, positions: Tensor, sign: float) -> Tensor:
        half = keys.shape[-1] // 2
        speed = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = sign * positions.double().unsqueeze(1).unsqueeze(-1) * speed  # [R, 1, n, half]
        first, second = keys.double().tensor_split(2, -1)
        parts = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat(parts, -1).to(keys.dtype)

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self.turned(keys, positions, 1.0)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self.turned(keys, positions, -1.0)


class View(Prefill):
    """A prompt in a store, as the core shows it to `fit`."""

    query_moment = recent_queries = None

    def __init__(self, store: Store) -> None:
        self.lengths, self.rows, self.rope = list(store.length), store, Rope()
        self.store, self.rotary = self.rows, self.rope

    def blocks(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.lengths[row], 64):
            yield self.rows.read(row, start, min(start + 64, self.lengths[row]))

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        raise AssertionError

    def pre_rope_blocks(self, row: int) -> Iterator[Tensor]:
        start = 0
        for keys, _ in self.blocks(row):
            positions = torch.arange(start, start + keys.shape[1]).unsqueeze(0)
            yield self.rope.unrotate(keys.unsqueeze(0), positions)[0]
            start += keys.shape[1]


class Problem:
    """A ragged batch of three rows: keys with structure before RoPE, encoded, stored and fitted."""

    def __init__(self, softcap: float | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        themes = torch.randn(3, HEADS, 27, DIM, generator=generator).repeat_interleave(CHUNK, 2)
        noise, self.values = torch.randn(2, *themes.shape, generator=generator).to(dtype)
        self.plain = (themes + 0.7 * noise).to(dtype)
        self.keys = Rope().rotate(self.plain, torch.arange(themes.shape[2]).expand(3, -1))
        heads = torch.randn(3, HEADS, GROUP, DIM, generator=generator).to(dtype)
        self.query = Query(heads, None, 0.4, softcap)
        self.layer = layer_of(3, HEADS, GROUP, DIM, dtype)
        self.retriever = make(Options(**options))
        self.codes = encoded(self.retriever, self.layer, self.keys, LENGTHS)

    def select(self, counts: list[int], width: int) -> Selection:
        return self.retriever.coarse_select(self.query, self.codes, budget_of(counts, width))

    def store(self, learn: bool = True) -> ShadowStore:
        assert isinstance(self.retriever, ShadowKV)
        store = self.retriever.allocate_store(self.layer, 256)
        assert isinstance(store, ShadowStore)
        for row, length in enumerate(LENGTHS):
            self.retriever.update(self.keys[[row], :, :length], self.values[[row], :, :length], store, [row])
        if learn:
            assert self.retriever.fit(self.layer, View(store)) == {}
        return store

    def fetched(self, selection: Selection, store: ShadowStore) -> Tensor:
        """The slots [B, H, K, 2, D] after `fetch`, which come in the selection's order."""
        assert isinstance(self.retriever, ShadowKV)
        slots = torch.full((*selection.indices.shape, 2, DIM), NAN, dtype=self.layer.dtype)
        selected = self.retriever.fetch(selection, store, slots)
        assert torch.equal(selected.valid, selection.indices >= 0)
        return slots

    def attended(self, selection: Selection, slots: Tensor) -> Tensor:
        nothing, active = torch.zeros(3, 0, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
        working = WorkingSet(slots, nothing, torch.zeros(3, dtype=torch.int64), active, 0)
        return attend(self.query, working, Selected(selection.indices >= 0))[0]

    def attention_to(self, row: int, head: int, tokens: list[int]) -> Tensor:
        """Exact attention [G, D] to some tokens."""
        weights = self.scores(row, head, self.keys[row, head, tokens]).softmax(-1)
        out: Tensor = weights @ self.values[row, head, tokens]
        return out

    def scores(self, row: int, head: int, keys: Tensor) -> Tensor:
        scores: Tensor = self.query.heads[row, head] @ keys.mT * self.query.scaling
        softcap = self.query.softcap
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def chunks(self, row: int, head: int) -> Tensor:
        """The keys [M, 8, D] of a row's chunks."""
        return self.keys[row, head, : LENGTHS[row]].view(-1, CHUNK, DIM)

    def outliers(self, row: int, head: int, count: int) -> list[int]:
        """The chunks with the lowest cosine between a member and the mean."""
        chunks = self.chunks(row, head)
        cosines = cosine_similarity(chunks, chunks.mean(1, keepdim=True), dim=-1).amin(-1)
        return cosines.argsort()[:count].tolist()


def encoded(retriever: Landmarks, layer: LayerInfo, keys: Tensor, lengths: list[int]) -> Codes:
    """Codes that are NaN past a row's length."""
    codes = retriever.allocate_codes(layer, keys.shape[2] + 40)
    for field in codes.fields.values():
        field.fill_(NAN)
    for row, length in enumerate(lengths):
        block = keys[[row], :, :length]
        codes.append([row], [0], retriever.encode(block, block, {}), length)
    codes.length.copy_(torch.tensor(lengths))
    return codes


def tokens_of(selection: Selection, row: int, head: int) -> list[int]:
    return [token for token in selection.indices[row, head].tolist() if token >= 0]


@pytest.mark.parametrize("options", [Options(chunk=1), Options(chunk=12, outliers=0, rank=3), Options(generated=True)])
def test_it_keeps_the_contract_with_other_options(options: Options) -> None:
    check_retriever(make(options), kv_heads=1, lengths=(300, 1), top_k=200)


# The selection


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("count", [8, 64, 85, 128])
def test_outliers_then_the_chunks_that_some_head_attends_to_most(count: int, softcap: float | None) -> None:
    problem = Problem(softcap)
    selection = problem.select([min(count, length) for length in LENGTHS], 130)
    for row, length in list(enumerate(LENGTHS))[:2]:
        for head in range(HEADS):
            budget = min(count, length)
            outliers = problem.outliers(row, head, budget * 24 // 1024)
            scores = problem.scores(row, head, problem.chunks(row, head).mean(1))
            scores[:, outliers] = -torch.inf
            best = scores.softmax(-1).amax(0).argsort(descending=True).tolist()
            order = outliers + [chunk for chunk in best if chunk not in outliers]
            tokens = [chunk * CHUNK + place for chunk in order for place in range(CHUNK)]
            assert set(tokens_of(selection, row, head)) == set(tokens[:budget])
    assert tokens_of(selection, 2, 0) == []


def test_no_more_outliers_than_the_option_allows() -> None:
    few, none = Problem(outliers=1).select(LENGTHS, 200), Problem(outliers=0)
    assert sorted(tokens_of(few, 0, 0)) == [*range(200)]
    budget = [128, 64, 0]  # 3 outliers by the budget
    two_heads = [set(tokens_of(Problem(outliers=1).select(budget, 128), 0, head)) for head in range(HEADS)]
    for head, tokens in enumerate(two_heads):
        assert problem_outlier(none, head) <= tokens
    scores = none.scores(0, 0, none.chunks(0, 0).mean(1)).softmax(-1).amax(0)
    wanted = {chunk * CHUNK for chunk in scores.topk(16).indices.tolist()}
    assert {token for token in tokens_of(none.select(budget, 128), 0, 0) if token % CHUNK == 0} == wanted


def problem_outlier(problem: Problem, head: int) -> set[int]:
    (chunk,) = problem.outliers(0, head, 1)
    return {chunk * CHUNK + place for place in range(CHUNK)}


def test_keys_that_are_all_the_same_fill_the_budget() -> None:
    retriever, layer = make(), layer_of(1, 1, 1, DIM)
    codes = encoded(retriever, layer, torch.ones(1, 1, 64, DIM), [64])
    selection = retriever.coarse_select(Query(torch.ones(1, 1, 1, DIM), None, 1.0), codes, budget_of([20], 24))
    assert len(set(tokens_of(selection, 0, 0))) == 20


# The store


def test_at_full_rank_it_equals_attention_to_exactly_the_selected_chunks() -> None:
    problem = Problem(rank=FULL, outliers=0)
    selection = problem.select([80, 40, 0], 80)
    out = problem.attended(selection, problem.fetched(selection, problem.store()))
    for row in (0, 1):
        for head in range(HEADS):
            wanted = problem.attention_to(row, head, tokens_of(selection, row, head))
            # Keys went through two products and two rotations in float32.
            torch.testing.assert_close(out[row, head], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 5, FULL - 1])
def test_keys_are_those_of_a_truncated_svd_put_back_into_the_embedding(rank: int) -> None:
    problem = Problem(rank=rank, outliers=0, dtype=torch.float64)
    selection = problem.select([80, 40, 0], 80)
    slots = problem.fetched(selection, problem.store())
    for row in (0, 1):
        length = LENGTHS[row]
        flat = problem.plain[row, :, :length].transpose(0, 1).reshape(length, FULL)
        u, s, vh = torch.linalg.svd(flat, full_matrices=False)
        low = (u[:, :rank] * s[:rank] @ vh[:rank]).view(length, HEADS, DIM).transpose(0, 1)
        wanted = Rope().rotate(low.unsqueeze(0), torch.arange(length).unsqueeze(0))[0]
        for head in range(HEADS):
            tokens = tokens_of(selection, row, head)
            got = slots[row, head, : len(tokens)]
            torch.testing.assert_close(got[:, 0], wanted[head, tokens], rtol=1e-9, atol=1e-9)
            assert torch.equal(got[:, 1], problem.values[row, head, tokens]), "values are exact"


def test_the_error_falls_as_the_rank_grows() -> None:
    def error(rank: int) -> float:
        problem = Problem(rank=rank, outliers=0)
        selection = problem.select([80, 40, 0], 80)
        wanted = problem.attended(selection, problem.fetched(selection, problem.store(learn=False)))
        return float((problem.attended(selection, problem.fetched(selection, problem.store())) - wanted)[:2].norm())

    errors = [error(rank) for rank in (2, 8, 16, 28, FULL)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-4


def test_outlier_chunks_keep_their_exact_keys() -> None:
    problem = Problem(rank=1, outliers=2)
    everything = problem.select(LENGTHS, 200)
    slots = problem.fetched(everything, problem.store())
    for row in (0, 1):
        for head in range(HEADS):
            tokens = tokens_of(everything, row, head)
            same = (slots[row, head, : len(tokens), 0] == problem.keys[row, head, tokens]).all(-1)
            exact = {token // CHUNK for token, is_exact in zip(tokens, same.tolist(), strict=True) if is_exact}
            assert exact == set(problem.outliers(row, head, 2))
            assert int(same.sum()) == 2 * CHUNK


def test_a_store_that_has_learnt_fetches_values_only_and_reads_exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem()
    store = problem.store()
    selection = problem.select([80, 40, 0], 80)

    def refuse(indices: Tensor) -> Tensor:
        raise AssertionError("keys were fetched")

    monkeypatch.setattr(store.keys, "fetch", refuse)
    problem.fetched(selection, store)
    assert store.row_bytes == store.values.fetch(selection.indices)[0, 0, 0].nbytes
    for got, source in zip(store.read(0, 3, 150), (problem.keys, problem.values), strict=True):
        assert torch.equal(got, source[0, :, 3:150])


def test_a_store_grows_and_takes_tokens_after_the_prompt_on_the_prompts_basis() -> None:
    problem = Problem(rank=FULL - 4, outliers=2)
    store = problem.store()
    everything = problem.select(LENGTHS, 200)
    before = problem.fetched(everything, store)
    store.grow(400)
    assert torch.equal(problem.fetched(everything, store), before)
    more = slice(200, 216)
    store.append(problem.keys[:1, :, more], problem.values[:1, :, more], [0])
    new = torch.full((3, HEADS, 16), -1, dtype=torch.int32)
    new[0] = torch.arange(200, 216)
    slots = problem.fetched(Selection(new), store)
    basis = store.basis[0].transpose(0, 1).flatten(1)
    flat = problem.plain[0, :, more].transpose(0, 1).flatten(1)
    wanted = (flat @ basis.mT @ basis).view(16, HEADS, DIM).transpose(0, 1).unsqueeze(0)
    wanted = Rope().rotate(wanted, torch.arange(200, 216).unsqueeze(0))[0]
    torch.testing.assert_close(slots[0, :, :, 0], wanted, rtol=1e-4, atol=1e-5)
    assert store.length == [216, 64, 0]


def test_a_row_learns_once() -> None:
    problem = Problem()
    store = problem.store()
    basis = store.basis.clone()
    more = problem.keys[:1, :, 200:208]
    store.append(more, more, [0])
    problem.retriever.fit(problem.layer, View(store))  # type: ignore[attr-defined]
    assert torch.equal(store.basis, basis)


def test_what_the_device_holds_of_a_key() -> None:
    layer = layer_of(1, 8, 4, 128, torch.bfloat16)
    small, large = (make().allocate_store(layer, tokens) for tokens in (1024, 2048))  # type: ignore[attr-defined]
    # 160 coefficients for 8 heads' keys of 256 bytes, and where a chunk's exact keys are.
    assert (large.device_bytes - small.device_bytes) / 1024 == 160 * 2 + 8 * 4 / 8
    assert make().allocate_codes(layer, 1024).nbytes / 1024 / 8 == (128 * 2 + 4) / 8


def test_another_retrievers_store_is_refused() -> None:
    store = Resident().allocate_store(layer_of(1, 1, 1, DIM), 8)
    with pytest.raises(BindingError, match=r"shadowkv: got a ResidentStore, .* take all three stages from one"):
        ShadowKV().fetch(Selection(torch.zeros(1, 1, 1, dtype=torch.int32)), store, torch.zeros(1, 1, 1, 2, DIM))


# Among the others


@pytest.mark.parametrize("other", [Exact, ParisPaper])
def test_another_retriever_reranks_its_chunks(other: Any) -> None:
    problem, reranker = Problem(), other()
    codes = reranker.allocate_codes(problem.layer, 256)
    for row, length in enumerate(LENGTHS):
        keys = problem.keys[[row], :, :length]
        codes.append([row], [0], reranker.encode(keys, keys, {}), length)
    codes.length.copy_(torch.tensor(LENGTHS))
    heads = problem.query.heads
    query = Query(heads, reranker.encode_query(heads, {}) if hasattr(reranker, "encode_query") else None, 0.4)
    candidates = problem.select([80, 32, 0], 80)
    final = reranker.rerank(query, candidates, codes, 16)
    assert [len(tokens_of(final, row, 0)) for row in range(3)] == [16, 16, 0]
    assert set(tokens_of(final, 0, 1)) <= set(tokens_of(candidates, 0, 1))


def test_a_step_never_asks_the_host() -> None:
    problem = Problem()
    assert problem.retriever.graph_safe
    store, budget = problem.store(), budget_of([80, 32, 0], 80)
    before = problem.fetched(problem.select([80, 32, 0], 80), store)
    slots = torch.zeros_like(before)
    with no_host():
        selection = problem.retriever.coarse_select(problem.query, problem.codes, budget)
        store.fetch(selection, slots)
    used = selection.indices >= 0
    assert torch.equal(slots[used], before[used])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk=0; set it to 1 or more"),
        ({"outliers": -1}, "outliers=-1; set it to 0 or more"),
        ({"rank": 0}, "rank=0; set it to 1 or more"),
        ({"keys": "exact"}, "keys='exact'; set it to low_rank or store"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"shadowkv: {message}"):
        make(Options(**options))


def test_heads_that_cannot_turn_in_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"heads of 15 coordinates, .*; set keys: store"):
        ShadowKV().allocate_store(layer_of(1, 1, 1, 15), 8)


def test_it_ships_with_pariskv_in_both_kinds() -> None:
    registry = Registry.load(entry_points=False)
    assert type(registry.make("shadowkv", {})) is ShadowKV
    assert type(registry.make("shadowkv", {"keys": "store"})) is Landmarks
    assert make().indexes == "prompt"
    assert make(Options(generated=True)).indexes == "all"


# In a model: its keys of all heads have 32 coordinates, so any rank from 32 on is full


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_budget_that_covers_the_history_generates_what_dense_attention_does(family: str, generates: bool) -> None:
    model = tiny_model(family)
    config = config_of("shadowkv", {"outliers": 0, "generated": generates}, top_k=400)
    for length in (3, 60):
        want, _ = dense_generate(model, prompt(length), 40)
        tokens, cache = generated(model, prompt(length), config, 40)
        assert torch.equal(tokens, want)
        zone = (length - SINK - LOCAL) // 8 * 8 if length > 3 else 0
        assert (cache.request.layers[1].zones[0] > zone) == generates, "only where asked are generated tokens indexed"


def test_prefill_in_chunks_learns_the_same() -> None:
    model, ids = tiny_model("llama"), prompt(150)
    config = config_of("shadowkv", {"rank": 6, "outliers": 1}, top_k=16)
    whole, _ = generated(model, ids, config, 24)
    dense, _ = dense_generate(model, ids, 24)
    assert not torch.equal(whole, dense), "a budget that loses something, or the test shows nothing"
    assert torch.equal(generated(model, ids, config, 24, chunk=32)[0], whole)


def test_a_ragged_batch_gives_each_row_what_it_gets_alone() -> None:
    model = tiny_model("llama")
    config = config_of("shadowkv", {"rank": 6, "outliers": 1}, top_k=16)
    rows = [prompt(length, seed=length) for length in (3, 41, 150)]
    ids, mask = padded(rows)
    together, _ = generated(model, ids, config, 24, mask)
    for place, row in enumerate(rows):
        assert torch.equal(together[place : place + 1], generated(model, row, config, 24)[0])


def test_a_later_turn_reads_exact_keys_and_goes_on_with_the_basis() -> None:
    model = tiny_model("llama")
    cache = ParisCache(model, config_of("shadowkv", {"outliers": 0}, top_k=400))
    ids = prompt(60)
    arguments = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    first = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **arguments)
    second = torch.cat((first, prompt(30, seed=1)), 1)
    got = model.generate(second, attention_mask=torch.ones_like(second), cache=cache, **arguments)
    want, _ = dense_generate(model, second, 8)
    assert torch.equal(got[:, second.shape[1] :], want)
    assert cache.request.layers[1].zones[0] > 48, "the later turn's tokens must have been indexed"


def test_a_model_that_cannot_give_keys_before_rope_is_refused_unless_they_are_not_needed() -> None:
    model = tiny_model("gemma3")
    with pytest.raises(BindingError, match="it needs keys before RoPE, but Gemma3ForCausalLM has no rotary"):
        ParisCache(model, config_of("shadowkv", top_k=400))
    want, _ = dense_generate(model, prompt(60), 16)
    tokens, _ = generated(model, prompt(60), config_of("shadowkv", {"keys": "store"}, top_k=400), 16)
    assert torch.equal(tokens, want)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_an_embedding_whose_angles_depend_on_the_length_counts_as_none(kind: str) -> None:
    model = tiny_model("llama")
    assert rotary_of(model) is not None
    model.model.rotary_emb.rope_type = kind
    assert rotary_of(model) is None


@pytest.mark.parametrize("stages", [{"coarse_select": "it", "rerank": "exact"}, {"coarse_select": "it"}])
def test_its_selection_goes_with_another_retrievers_store(stages: dict[str, Any]) -> None:
    model = tiny_model("llama")
    config = config_of("shadowkv", top_k=400, **stages)
    config = replace(config, layers={"default": replace(config.layers["default"], retriever="pariskv")})
    want, _ = dense_generate(model, prompt(60), 16)
    tokens, cache = generated(model, prompt(60), config, 16)
    assert torch.equal(tokens, want)
    assert not isinstance(cache.request.layers[0].store, ShadowStore)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [Options(), Options(offload=False), Options(keys="store")])
def test_it_keeps_the_contract_on_a_gpu(options: Options, dtype: torch.dtype) -> None:
    check_retriever(make(options), lengths=(256, 64, 0), dtype=dtype, device="cuda")


@needs_gpu
def test_replayed_steps_equal_eager_ones_with_values_in_host_memory() -> None:
    from tests.integration.test_gpu import loop, replayed

    model, ids = tiny_model("llama").cuda(), prompt(150).cuda()
    for options in ({"rank": 6, "outliers": 1}, {"rank": 6, "generated": True}):
        config = config_of("shadowkv", options, top_k=16)
        assert torch.equal(replayed(model, ids, config, 100)[0], loop(model, ids, config, 100, graph="off"))
