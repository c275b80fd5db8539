"""`pariskv` in its frame: nothing is lost by it, votes and estimates are what they say, and drift is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_kernels.frame import to_frame
from pariskv_plugins.paris import Options, ParisKV, frame
from pariskv_plugins.paris.frame import learn_frame, preconditioner, zone_shares
from pariskv_plugins.resident import Resident
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor

from pariskv.errors import ConfigError, PluginContractError
from pariskv.testing import check_retriever
from pariskv.types import RECENT_QUERIES, Codes, LayerInfo, Prefill, Query, Tensors
from tests.plugins.driving import budget_of, config_of, filled, generated, layer_of, padded
from tests.plugins.test_graph_safe import no_host

LENGTHS = [300, 70, 0]
CAPACITY = 330
SINK_AND_RING = 90
OFF: dict[str, Any] = {
    "centre": "none",
    "precondition": "none",
    "norm_weight": False,
    "vote_combine": "mean_query",
    "combine": "mean_query",
}


class Prompt(Prefill):
    """Keys [B, H, N, D] in two blocks a row, with what `fit` may ask for; past a row's length it shows nothing."""

    def __init__(self, layer: LayerInfo, keys: Tensor, lengths: list[int], seed: int = 0, blocks: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, heads, group, dim = layer.batch, layer.kv_heads, layer.group, layer.head_dim
        self.keys, self.lengths, self.parts = keys, lengths, blocks
        self.queries = torch.randn(batch, heads, group, 200, dim, generator=generator) @ skew(dim, 7)
        flat = self.queries.flatten(2, 3).double()
        self.query_moment = flat.mT @ flat
        self.model_moment = torch.eye(dim).expand(heads, dim, dim)
        self.recent_queries = self.queries[:, :, :, -RECENT_QUERIES:]
        self.newest = torch.randn(batch, heads, SINK_AND_RING, dim, generator=generator)

    def blocks(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        ends = [self.lengths[row] * part // self.parts for part in range(self.parts + 1)]
        for start, stop in itertools.pairwise(ends):
            yield self.keys[row, :, start:stop], self.keys[row, :, start:stop]

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        return self.newest[row], self.newest[row]

    def pre_rope_blocks(self, row: int) -> Iterator[Tensor]:
        raise AssertionError


def skew(dim: int, seed: int) -> Tensor:
    """A matrix that stretches some directions far more than others."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    return turn @ torch.diag(torch.logspace(-1, 1, dim)) @ turn.mT


def skewed_keys(batch: int, heads: int, n: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    far = 20 * torch.randn(batch, heads, 1, dim, generator=generator)  # a mean far from 0, as real keys have it
    return torch.randn(batch, heads, n, dim, generator=generator) @ skew(dim, seed + 1) + far


def problem(dim: int = 64, group: int = 3, **options: Any) -> tuple[ParisKV, Query, Codes, Tensor, Tensors]:
    """A ragged batch of three rows, 2 key/value heads, with NaN past the end."""
    layer = layer_of(3, 2, group, dim)
    keys = skewed_keys(3, 2, CAPACITY, dim)
    for row, length in enumerate(LENGTHS):
        keys[row, :, length:] = float("nan")
    retriever = ParisKV(Options(**options))
    view = Prompt(layer, keys, LENGTHS)
    state = retriever.fit(layer, view)
    codes = filled(retriever, layer, keys, LENGTHS, state)
    heads = view.queries[:, :, :, 0].contiguous()
    steady = torch.randn(3, 2, group, generator=torch.Generator().manual_seed(3))
    return retriever, Query(heads, retriever.encode_query(heads, state), 0.125, None, steady), codes, keys, state


# The frame


@pytest.mark.parametrize("dim", [64, 80, 16])
@pytest.mark.parametrize("precondition", ["none", "model", "prompt", "both"])
@pytest.mark.parametrize("centre", ["none", "prefill"])
def test_in_any_frame_every_inner_product_is_kept(dim: int, precondition: str, centre: str) -> None:
    layer, keys = layer_of(3, 2, 3, dim), skewed_keys(3, 2, 300, dim)
    view = Prompt(layer, keys, LENGTHS)
    state = learn_frame(layer, view, centre, precondition, 1.0, True, 42)
    z = to_frame(keys, state["centre"], state["keys_to"], state["power"]).z.double()
    queries = ParisKV(Options(rest="none")).encode_query(view.queries[:, :, :, 0], state)
    for row in (0, 1):
        wanted = view.queries[row, :, :, 0].double() @ keys[row].double().mT
        found = queries["heads"][row].double() @ z[row].mT / z.shape[-1] + queries["offset"][row].double().unsqueeze(2)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
        if centre == "none":
            assert not bool(state["centre"].any())
        else:
            torch.testing.assert_close(state["centre"][row], keys[row, :, : LENGTHS[row]].mean(1), rtol=1e-4, atol=1e-4)


def test_the_frame_is_where_the_errors_trace_is_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "RIDGE", 1e-9)
    generator = torch.Generator().manual_seed(0)
    moments = [torch.randn(2, 400, 12, generator=generator, dtype=torch.float64) @ skew(12, i).double() for i in (1, 2)]
    keys, queries = (x.mT @ x / 400 for x in moments)

    def trace(stretch: Tensor) -> Tensor:
        inverse = torch.linalg.inv(stretch)
        spread = (stretch @ keys @ stretch.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
        return spread * (inverse.mT @ queries @ inverse).diagonal(dim1=-2, dim2=-1).sum(-1)

    stretch, inverse = preconditioner(keys, queries, 1.0)
    torch.testing.assert_close(stretch @ inverse, torch.eye(12, dtype=torch.float64).expand(2, 12, 12))
    best = trace(stretch)
    for exponent in (0.0, 0.5, 0.9, 1.1, 2.0):
        assert bool((trace(preconditioner(keys, queries, exponent)[0]) > best).all())
    for _ in range(20):
        other = stretch + 0.05 * torch.randn(2, 12, 12, generator=generator, dtype=torch.float64)
        assert bool((trace(other) > best).all())
    assert bool((trace(torch.eye(12, dtype=torch.float64).expand(2, 12, 12)) > 2 * best).all())


@pytest.mark.parametrize("precondition", ["model", "both"])
def test_without_a_calibration_the_prompts_own_queries_serve(precondition: str) -> None:
    layer, keys = layer_of(3, 2, 3, 64), skewed_keys(3, 2, 300, 64)
    view = Prompt(layer, keys, LENGTHS)
    own = learn_frame(layer, view, "prefill", "prompt", 1.0, False, 42)
    with_table = learn_frame(layer, view, "prefill", precondition, 1.0, False, 42)
    view.model_moment = None  # type: ignore[assignment]
    without = learn_frame(layer, view, "prefill", precondition, 1.0, False, 42)
    assert torch.equal(without["keys_to"], own["keys_to"])
    assert not torch.equal(with_table["keys_to"], own["keys_to"])


def test_a_row_learns_the_same_alone_and_from_blocks_of_another_size() -> None:
    layer, keys = layer_of(3, 2, 3, 64), skewed_keys(3, 2, 300, 64)
    whole = Prompt(layer, keys, LENGTHS)
    together = ParisKV().fit(layer, whole)
    alone = Prompt(replace(layer, batch=1), keys[1:2], LENGTHS[1:2])
    for name in ("query_moment", "recent_queries", "newest"):
        setattr(alone, name, getattr(whole, name)[1:2])
    for name, tensor in ParisKV().fit(replace(layer, batch=1), alone).items():
        assert torch.equal(tensor[0], together[name][1]), name


def test_keys_that_are_all_the_same_and_a_row_without_keys_have_a_frame() -> None:
    layer = layer_of(2, 2, 3, 64)
    keys = torch.ones(2, 2, 50, 64)
    retriever = ParisKV()
    state = retriever.fit(layer, Prompt(layer, keys, [50, 0]))
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    codes = filled(retriever, layer, keys, [50, 0], state)
    heads = torch.randn(2, 2, 3, 64)
    query = Query(heads, retriever.encode_query(heads, state), 0.125)
    got = retriever.rerank(query, retriever.coarse_select(query, codes, budget_of([20, 0], 20)), codes, 10)
    assert got.indices[0].tolist() == [list(range(10))] * 2  # all as good as each other: the first
    assert got.indices[1].tolist() == [[-1] * 10] * 2


# Heads


def test_heads_that_look_into_the_zone_have_the_say() -> None:
    layer = layer_of(1, 1, 2, 16)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 200, 16, generator=generator)
    view = Prompt(layer, keys, [200])
    recent = torch.zeros(1, 1, 2, RECENT_QUERIES, 16)
    recent[0, 0, 0] = 8 * keys[0, 0, 100:164]  # looks for tokens of the zone
    recent[0, 0, 1] = 8 * view.newest[0, 0, 3]  # looks at the sink
    view.recent_queries = recent
    shares = zone_shares(layer, view, 0)
    assert float(shares.mean()) == pytest.approx(1)
    assert float(shares[0, 0]) > 1.9
    assert float(shares[0, 1]) < 0.1


def test_a_query_does_not_see_the_tokens_after_it() -> None:
    layer = layer_of(1, 1, 1, 16)
    view = Prompt(layer, torch.zeros(1, 1, 200, 16), [200])
    view.recent_queries = torch.zeros(1, 1, 1, RECENT_QUERIES, 16)
    view.newest = torch.zeros(1, 1, SINK_AND_RING, 16)
    share = zone_shares(replace(layer, group=1), view, 0)
    assert share.tolist() == [[1.0]]  # of one head, whatever it does
    two = replace(layer, group=2)
    view.recent_queries = torch.zeros(1, 1, 2, RECENT_QUERIES, 16)
    view.recent_queries[0, 0, 1] = 3.0
    view.newest[0, 0, -1] = 3.0  # only the last query can see it
    expected = torch.full((RECENT_QUERIES,), 200.0)
    seen = torch.arange(SINK_AND_RING - RECENT_QUERIES + 1, SINK_AND_RING + 1).float()
    plain = (expected / (expected + seen)).mean()
    last = seen.clone()
    last[-1] += torch.exp(torch.tensor(16 * 9 * two.scaling)) - 1
    other = (expected / (expected + last)).mean()
    wanted = torch.stack((plain, other)) / (plain + other) * 2
    torch.testing.assert_close(zone_shares(two, view, 0)[0], wanted)


# Selection


@pytest.mark.parametrize("vote_combine", ["mean_query", "weighted_query"])
@pytest.mark.parametrize("norm_weight", [True, False])
def test_candidates_have_the_highest_estimates_of_the_sign_patterns(vote_combine: str, norm_weight: bool) -> None:
    retriever, query, codes, keys, state = problem(vote_combine=vote_combine, norm_weight=norm_weight)
    got = retriever.coarse_select(query, codes, budget_of([60, 30, 0], 60)).indices
    z = to_frame(keys, state["centre"], state["keys_to"], state["power"]).z.double()
    heads = query.encoded["heads"].double()  # type: ignore[index]
    weights = state["weights"].double() if vote_combine == "weighted_query" else torch.ones(3, 2, 3).double()
    mean = (heads * weights.unsqueeze(3)).mean(2)
    for row, head in itertools.product((0, 1), range(2)):
        n, count = LENGTHS[row], (60, 30)[row]
        score = (torch.sign(z[row, head, :n]) * mean[row, head]).sum(1)
        score = score * z[row, head, :n].norm(dim=1) if norm_weight else score
        best = set(score.topk(count).indices.tolist())
        chosen = {token for token in got[row, head].tolist() if token >= 0}
        assert len(chosen) == count
        assert len(chosen & best) >= 0.85 * count  # weights of 31 levels, votes of a byte
    assert got[2].tolist() == [[-1] * 60] * 2


@pytest.mark.parametrize("combine", ["max_logit", "sum_softmax", "max_softmax", "mean_query"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_rerank_keeps_what_the_heads_together_want(combine: str, softcap: float | None) -> None:
    retriever, query, codes, keys, _ = problem(combine=combine)
    query = replace(query, softcap=softcap)
    candidates = retriever.coarse_select(query, codes, budget_of([300, 70, 0], 300))
    got = retriever.rerank(query, candidates, codes, 20).indices
    for row, head in itertools.product((0, 1), range(2)):
        scores = query.heads[row, head].double() @ keys[row, head, : LENGTHS[row]].double().mT * 0.125
        if combine == "mean_query":
            ranked = scores.mean(0)
        else:
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            assert query.steady is not None
            everything = torch.cat((scores, query.steady[row, head].double().unsqueeze(1)), dim=1)
            shares = scores if combine == "max_logit" else everything.log_softmax(1)[:, :-1]
            ranked = shares.logsumexp(0) if combine == "sum_softmax" else shares.amax(0)
        chosen = got[row, head].tolist()
        best = ranked.topk(20).values
        assert len(set(chosen)) == 20
        # Estimates of 4 bits a coordinate; soft-capped scores crowd at the top.
        assert float(ranked[chosen].exp().sum() / best.exp().sum()) > 0.9


def recall(options: dict[str, Any], seed: int) -> float:
    """Share of the true best 50 of 3,000 that are among 150 candidates, keys and queries being skewed apart."""
    layer = layer_of(1, 1, 4, 64)
    keys = skewed_keys(1, 1, 3000, 64, seed)
    retriever, view = ParisKV(Options(**options)), Prompt(layer, keys, [3000], seed)
    state = retriever.fit(layer, view)
    codes = filled(retriever, layer, keys, [3000], state)
    found = 0.0
    for step in range(8):
        heads = view.queries[:, :, :, step].contiguous()
        query = Query(heads, retriever.encode_query(heads, state), 0.125)
        candidates = retriever.coarse_select(query, codes, budget_of([150], 150)).indices[0, 0]
        best = (heads[0, 0].mean(0) @ keys[0, 0].T).topk(50).indices
        found += float(torch.isin(best, candidates).float().mean()) / 8
    return found


def test_every_part_of_it_finds_more() -> None:
    steps: list[dict[str, Any]] = [
        {**OFF, "vote": "tiers"},
        {**OFF},
        {**OFF, "norm_weight": True},
        {**OFF, "norm_weight": True, "centre": "prefill"},
        {**OFF, "norm_weight": True, "centre": "prefill", "precondition": "prompt"},
    ]
    found = [sum(recall(options, seed) for seed in range(2)) / 2 for options in steps]
    assert found[-1] > 0.85, found
    assert found[-1] > found[-2] + 0.1, found
    assert found[-2] > found[0] + 0.1, found


# Drift


def test_the_state_is_stale_where_the_newest_keys_lie_off_its_centre() -> None:
    retriever, layer = ParisKV(), layer_of(2, 2, 3, 64)
    keys = skewed_keys(2, 2, 800, 64)
    state = retriever.fit(layer, Prompt(layer, keys, [800, 400]))
    block = keys[:, :, :256]
    far = block.clone()
    far[1] += 40 * torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(5))
    fitted = [800, 400]
    assert retriever.is_stale(block, state, fitted, [800, 800]) == [False, False]
    assert retriever.is_stale(far, state, fitted, [800, 800]) == [False, True]
    assert retriever.is_stale(far, state, fitted, [50, 50]) == [False, True]
    assert ParisKV(Options(recentre=0.0)).is_stale(far, state, fitted, [800, 800]) == [False, False]
    with no_host():  # an eighth of what it was learnt from has not come yet: nothing is looked at
        assert retriever.is_stale(far, state, fitted, [99, 49]) == [False, False]


# The contract


@pytest.mark.parametrize(
    ("options", "floor"),
    [
        ({}, 0.9),
        ({"subspace_dim": 4}, 0.9),
        ({**OFF}, 0.5),
        ({"vote": "tiers", "vote_combine": "sum_votes"}, 0.9),
        ({"vote": "tiers"}, 0.85),
        ({"precondition": "model", "combine": "max_logit"}, 0.75),
        ({"precondition": "prompt", "combine": "max_softmax", "exponent": 0.5}, 0.7),
        ({"norm_weight": False}, 0.9),
    ],
)
def test_it_keeps_the_contract_with_every_option(options: dict[str, Any], floor: float) -> None:
    check_retriever(ParisKV(Options(**options)), lengths=(700, 16, 0), recall_floor=floor)


def test_it_keeps_the_contract_at_other_sizes() -> None:
    check_retriever(ParisKV(), head_dim=256, group=8, dtype=torch.bfloat16)
    check_retriever(ParisKV(), head_dim=80, group=1, kv_heads=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centre": "mean"}, "pariskv: centre='mean'; set it to one of none, prefill"),
        ({"vote": "linear", "vote_combine": "sum_votes"}, "pariskv: vote_combine=sum_votes with vote=linear"),
        ({"combine": "per_query_head"}, "pariskv: combine='per_query_head'; set it to one of mean_query, max_logit"),
        ({"precondition": "mine"}, "pariskv: precondition='mine'; set it to one of none, model, prompt, both"),
        ({"exponent": -1.0}, r"pariskv: exponent=-1\.0; set it to a number from 0 to 2"),
        ({"recentre": -1.0}, r"pariskv: recentre=-1\.0; set it above 0, or to 0 for never"),
        ({"subspace_dim": 16}, "pariskv: subspace_dim=16; set it to 4 or 8"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParisKV(Options(**options))


def test_a_query_that_its_producer_did_not_encode_is_refused() -> None:
    retriever, query, codes, _, _ = problem()
    with pytest.raises(PluginContractError, match=r"query\.encoded has no 'rotated'; pass what encode_query"):
        retriever.coarse_select(replace(query, encoded=None), codes, budget_of([5, 5, 0], 5))


@pytest.mark.parametrize("options", [{}, {"vote": "tiers", "vote_combine": "sum_votes", "combine": "mean_query"}])
def test_a_step_never_asks_the_host(options: dict[str, Any]) -> None:
    retriever, query, codes, keys, state = problem(**options)
    resident, budget = Resident(), budget_of([50, 20, 0], 50)
    store, slots = resident.allocate_store(layer_of(3, 2, 3, 64), CAPACITY), torch.zeros(3, 2, 20, 2, 64)
    resident.update(keys, keys, store, [0, 1, 2])

    def step() -> Tensor:
        encoded = retriever.encode_query(query.heads, state)
        asked = replace(query, encoded=encoded)
        selection = retriever.rerank(asked, retriever.coarse_select(asked, codes, budget), codes, 20)
        return resident.fetch(selection, store, slots).valid

    assert retriever.graph_safe
    warmed_up = step()
    with no_host():
        again = step()
    assert torch.equal(again, warmed_up)


@pytest.mark.parametrize("chunk", [7, 64, None])
def test_a_ragged_batch_generates_what_its_rows_generate_alone_in_any_chunks(chunk: int | None) -> None:
    model = tiny_model("llama", torch.float32)
    rows = [prompt(90), prompt(59, seed=1)]
    config = config_of("pariskv", top_k=6, candidates=0.5)
    ids, mask = padded(rows)
    together, cache = generated(model, ids, config, 24, mask, chunk)
    assert [layer.zones for layer in cache.request.layers.values()] == [[96, 64]] * len(cache.request.layers)
    for row, one in enumerate(rows):
        alone, _ = generated(model, one, config, 24)
        assert torch.equal(together[row], alone[0])


def test_of_everything_selected_the_output_is_that_of_dense_attention() -> None:
    """Whatever the frame, rows stay as they are: with top_k of the whole zone nothing is approximated."""
    model, ids = tiny_model("llama"), prompt(90)
    tokens, _ = generated(model, ids, config_of("pariskv", top_k=500, candidates=1.0), 24)
    assert torch.equal(tokens, dense_generate(model, ids, 24)[0])
