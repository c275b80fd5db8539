"""RetroInfer against its definition: clusters recounted one by one, attention summed cluster by cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_plugins.exact import Exact
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.resident import Resident
from pariskv_plugins.retroinfer import Options, RetroInfer
from tiny_models import dense_generate, language_model, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache
from pariskv.attention import attend
from pariskv.config import Config
from pariskv.decode import Batch, decode_step, prefill
from pariskv.errors import ConfigError
from pariskv.registry import Registry
from pariskv.testing import check_retriever
from pariskv.types import Codes, Query, Selected, Selection, WorkingSet
from tests.plugins.driving import budget_of, config_of, generated, layer_of, padded
from tests.plugins.test_graph_safe import no_host

SEGMENT, CLUSTER = 64, 16
LENGTHS = [192, 64, 0]
HEADS, GROUP, DIM = 2, 3, 16
NAN = float("nan")


class Problem:
    """A ragged batch of three rows over keys with some structure, encoded; everything past a row's length is NaN."""

    def __init__(self, softcap: float | None = None, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        themes = torch.randn(1, HEADS, 9, DIM, generator=generator).repeat(3, 1, 25, 1)[:, :, :200]
        noise, values = torch.randn(2, *themes.shape, generator=generator)
        self.keys, self.values = themes + 0.5 * noise, values
        self.retriever = RetroInfer(Options(**{"segment": SEGMENT, "cluster": CLUSTER, **options}))
        heads = torch.randn(3, HEADS, GROUP, DIM, generator=generator)
        self.query = Query(heads, None, 0.4, softcap)
        self.codes = encoded(self.retriever, self.keys, self.values, LENGTHS)

    def select(self, counts: list[int], width: int) -> Selection:
        return self.retriever.coarse_select(self.query, self.codes, budget_of(counts, width))

    def attend(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """The selection through a store and attention, over a working set without steady rows."""
        return attended(self.query, self.keys, self.values, LENGTHS, selection)

    def clusters(self, row: int, head: int) -> list[list[int]]:
        """The zone's tokens by cluster, in the order of the codes, read from sizes and members alone."""
        tokens = [
            start + place
            for start in range(0, LENGTHS[row], SEGMENT)
            for place in self.codes["members"][row, head, start : start + SEGMENT].tolist()
        ]
        taken = iter(tokens)
        sizes = self.codes["sizes"][row, head, : LENGTHS[row] // CLUSTER].tolist()
        return [[next(taken) for _ in range(size)] for size in sizes]

    def scores(self, row: int, head: int, keys: Tensor) -> Tensor:
        """[G, n] of keys [n, D]."""
        scores = self.query.heads[row, head] @ keys.T * self.query.scaling
        softcap = self.query.softcap
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def ranking(self, row: int, head: int) -> list[list[int]]:
        """The clusters that are not empty, by the sum over the group of the softmax over their mean keys."""
        clusters = [cluster for cluster in self.clusters(row, head) if cluster]
        means = torch.stack([self.keys[row, head, cluster].mean(0) for cluster in clusters])
        mass = self.scores(row, head, means).softmax(-1).sum(0)
        return [clusters[place] for place in mass.argsort(descending=True).tolist()]


def encoded(retriever: RetroInfer, keys: Tensor, values: Tensor, lengths: list[int]) -> Codes:
    batch, heads, tokens, dim = keys.shape
    codes = retriever.allocate_codes(layer_of(batch, heads, GROUP, dim, keys.dtype), tokens + retriever.block)
    for field in codes.fields.values():
        field.fill_(NAN if field.is_floating_point() else 32767)
    for row, length in enumerate(lengths):
        if length:
            block = retriever.encode(keys[[row], :, :length], values[[row], :, :length], {})
            codes.append([row], [0], block, length)
    codes.length.copy_(torch.tensor(lengths))
    return codes


def attended(
    query: Query, keys: Tensor, values: Tensor, lengths: list[int], selection: Selection
) -> tuple[Tensor, Tensor]:
    batch, heads, _, dim = keys.shape
    resident = Resident()
    store = resident.allocate_store(layer_of(batch, heads, 1, dim, keys.dtype), max(lengths))
    for row, length in enumerate(lengths):
        resident.update(keys[[row], :, :length], values[[row], :, :length], store, [row])
    rows = torch.full((*selection.indices.shape, 2, dim), NAN, dtype=keys.dtype)
    selected: Selected = resident.fetch(selection, store, rows)
    nothing = torch.zeros(batch, 0, dtype=torch.bool)
    lengths_of_ring, active = torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.bool)
    return attend(query, WorkingSet(rows, nothing, lengths_of_ring, active, 0), selected)


def tokens_of(selection: Selection, row: int, head: int) -> list[int]:
    return [token for token in selection.indices[row, head].tolist() if token >= 0]


@pytest.mark.parametrize(
    "options", [{}, {"segment": 16, "cluster": 16}, {"segment": 24, "cluster": 8, "iterations": 0}]
)
def test_it_keeps_the_contract_with_other_options(options: dict[str, Any]) -> None:
    check_retriever(RetroInfer(Options(**options)), kv_heads=1, lengths=(300, 1))


# The golden ones


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_every_cluster_in_the_exact_zone_is_dense_attention(softcap: float | None) -> None:
    problem = Problem(softcap)
    selection = problem.select(LENGTHS, 200)
    out, lse = problem.attend(selection)
    for row, length in enumerate(LENGTHS):
        for head in range(HEADS):
            assert sorted(tokens_of(selection, row, head)) == [*range(length)]
            scores = problem.scores(row, head, problem.keys[row, head, :length])
            wanted = scores.softmax(-1) @ problem.values[row, head, :length]
            torch.testing.assert_close(out[row, head], wanted if length else torch.zeros_like(wanted))
            torch.testing.assert_close(lse[row, head], scores.logsumexp(-1))
    assert selection.extra is not None
    assert bool((selection.extra.bias == -torch.inf).all()), "a cluster that is exact must not be estimated, too"


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("count", [1, 5, 37, 63, 64])
def test_exact_estimated_and_dropped_are_summed_cluster_by_cluster(count: int, softcap: float | None) -> None:
    problem = Problem(softcap, estimated=0.5)
    selection = problem.select([min(count, length) for length in LENGTHS], 70)
    out, lse = problem.attend(selection)
    for row, length in list(enumerate(LENGTHS))[:2]:
        for head in range(HEADS):
            numerator, denominator = torch.zeros(GROUP, DIM), torch.zeros(GROUP)
            left, num_estimated = count, round(0.5 * (length // CLUSTER))
            chosen = set()
            for cluster in problem.ranking(row, head):
                exact, rest = cluster[: max(left, 0)], len(cluster[max(left, 0) :])
                left -= len(exact)
                chosen |= set(exact)
                keys, values = problem.keys[row, head], problem.values[row, head]
                weights = problem.scores(row, head, keys[exact]).exp()
                numerator += weights @ values[exact]
                denominator += weights.sum(-1)
                if rest and num_estimated:
                    num_estimated -= 1
                    weight = problem.scores(row, head, keys[cluster].mean(0, keepdim=True)).exp()
                    numerator += weight * rest * values[cluster].mean(0)
                    denominator += weight[:, 0] * rest
            assert set(tokens_of(selection, row, head)) == chosen
            torch.testing.assert_close(out[row, head], numerator / denominator.unsqueeze(-1), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[row, head], denominator.log(), rtol=1e-4, atol=1e-5)


def test_clusters_of_equal_keys_are_estimated_without_an_error() -> None:
    generator = torch.Generator().manual_seed(1)
    # Token i has key i mod 4; the initial centres, tokens 0, 17, 34 and 51, are one of each.
    keys = torch.eye(4, 16).repeat(17, 1).view(1, 1, 68, 16).expand(1, HEADS, -1, -1) * 3
    values = torch.randn(1, HEADS, 68, 16, generator=generator)
    query = Query(torch.randn(1, HEADS, GROUP, 16, generator=generator), None, 1.0)
    retriever = RetroInfer(Options(segment=68, cluster=17, estimated=1.0))
    codes = encoded(retriever, keys, values, [68])
    assert codes["sizes"][0, :, :4].tolist() == [[17] * 4] * HEADS
    selection = retriever.coarse_select(query, codes, budget_of([17], 20))  # one of the four is exact
    assert [len({token % 4 for token in tokens_of(selection, 0, head)}) for head in range(HEADS)] == [1, 1]
    out, lse = attended(query, keys, values, [68], selection)
    scores = query.heads @ keys.mT
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_without_an_estimated_zone_the_rest_is_dropped() -> None:
    selection = Problem(estimated=0.0).select([20, 20, 0], 20)
    assert selection.extra is None
    assert len(tokens_of(selection, 0, 0)) == 20


def test_the_exact_zones_share_bounds_it_beside_the_budget() -> None:
    problem = Problem(exact=0.17, estimated=1.0)  # 2 of 12 clusters, 1 of 4
    selection = problem.select(LENGTHS, 200)
    for row, num_exact in ((0, 2), (1, 1)):
        for head in range(HEADS):
            ranking = problem.ranking(row, head)
            assert set(tokens_of(selection, row, head)) == {token for part in ranking[:num_exact] for token in part}
            assert selection.extra is not None
            counts = sorted(len(part) for part in ranking[num_exact:])
            estimated = selection.extra.bias[row, head, 0].exp().round().int()
            assert sorted(estimated[estimated > 0].tolist()) == counts
    assert Options().estimated == 0.232


# The clusters


def test_a_cluster_is_the_mean_of_its_members_and_every_token_is_in_one() -> None:
    problem = Problem()
    for row, length in list(enumerate(LENGTHS))[:2]:
        for head in range(HEADS):
            clusters = problem.clusters(row, head)
            assert sorted(token for cluster in clusters for token in cluster) == [*range(length)]
            for place, cluster in enumerate(clusters):
                assert cluster == sorted(cluster)
                assert len({token // SEGMENT for token in cluster} | {place * CLUSTER // SEGMENT}) == 1
                if cluster:
                    for field, source in (("centroids", problem.keys), ("means", problem.values)):
                        wanted = source[row, head, cluster].mean(0)
                        torch.testing.assert_close(problem.codes[field][row, head, place], wanted, rtol=0, atol=1e-5)


def test_tokens_are_with_the_nearest_direction_once_the_iterations_have_settled() -> None:
    problem = Problem(iterations=50)
    for start in range(0, LENGTHS[0], SEGMENT):
        centred = problem.keys[0, 0, start : start + SEGMENT] - problem.keys[0, 0, start : start + SEGMENT].mean(0)
        inside = range(start, start + SEGMENT)
        parts = [[t - start for t in cluster] for cluster in problem.clusters(0, 0) if cluster and cluster[0] in inside]
        means = torch.nn.functional.normalize(torch.stack([centred[part].mean(0) for part in parts]), dim=-1)
        nearest = (centred @ means.T).argmax(-1)
        assert all(nearest[part].tolist() == [place] * len(part) for place, part in enumerate(parts))


def test_blocks_of_a_batch_are_clustered_as_each_alone() -> None:
    problem = Problem()
    keys, values = problem.keys[:, :, :128], problem.values[:, :, :128]
    together = problem.retriever.encode(keys, values, {})
    for row in range(3):
        for start in (0, SEGMENT):
            part = slice(start, start + SEGMENT)
            alone = problem.retriever.encode(keys[[row], :, part], values[[row], :, part], {})
            assert torch.equal(together["members"][[row], :, part], alone["members"])
            clusters = slice(start // CLUSTER, (start + SEGMENT) // CLUSTER)
            assert torch.equal(together["centroids"][[row], :, clusters], alone["centroids"])


def test_keys_that_are_all_the_same_are_one_cluster_which_the_budget_splits() -> None:
    keys = torch.ones(1, HEADS, SEGMENT, DIM)
    values = torch.randn(1, HEADS, SEGMENT, DIM, generator=torch.Generator().manual_seed(0))
    retriever = RetroInfer(Options(segment=SEGMENT))
    codes = encoded(retriever, keys, values, [SEGMENT])
    assert codes["sizes"][0, 0, :4].tolist() == [SEGMENT, 0, 0, 0]
    query = Query(torch.ones(1, HEADS, GROUP, DIM), None, 1.0)
    selection = retriever.coarse_select(query, codes, budget_of([10], 12))
    assert selection.indices[0].tolist() == [[*range(10), -1, -1]] * HEADS
    assert selection.extra is not None
    assert selection.extra.bias[0, 0, 0].tolist() == [pytest.approx(math.log(SEGMENT - 10)), -math.inf]


def test_a_key_of_128_costs_34_bytes() -> None:
    layer = replace(layer_of(1, 1, 1, 128), dtype=torch.bfloat16)
    assert RetroInfer().allocate_codes(layer, 1024).nbytes / 1024 == 2 * 128 * 2 / 16 + 2 / 16 + 2


# Among the others


@pytest.mark.parametrize("other", [Exact, ParisPaper])
def test_another_retriever_reranks_its_members_and_keeps_the_estimate(other: Any) -> None:
    problem, reranker = Problem(), other()
    codes = reranker.allocate_codes(layer_of(3, HEADS, GROUP, DIM), 256)
    for row, length in enumerate(LENGTHS):
        keys = problem.keys[[row], :, :length]
        codes.append([row], [0], reranker.encode(keys, keys, {}), length)
    codes.length.copy_(torch.tensor(LENGTHS))
    candidates = problem.select([80, 32, 0], 80)
    encoded_query = reranker.encode_query(problem.query.heads, {}) if hasattr(reranker, "encode_query") else None
    final = reranker.rerank(replace(problem.query, encoded=encoded_query), candidates, codes, 16)
    assert final.extra is candidates.extra
    assert [len(tokens_of(final, row, 0)) for row in range(3)] == [16, 16, 0]
    assert set(tokens_of(final, 0, 1)) <= set(tokens_of(candidates, 0, 1))


def test_a_step_never_asks_the_host() -> None:
    problem = Problem()
    assert problem.retriever.graph_safe
    budget = budget_of([80, 32, 0], 80)
    before = problem.retriever.coarse_select(problem.query, problem.codes, budget)
    with no_host():
        again = problem.retriever.coarse_select(problem.query, problem.codes, budget)
    assert torch.equal(before.indices, again.indices)


def test_codes_grow_and_keep_their_choice() -> None:
    problem = Problem()
    before = problem.select([80, 32, 0], 80)
    problem.codes.grow(1024)
    after = problem.select([80, 32, 0], 80)
    assert torch.equal(before.indices, after.indices)
    assert before.extra is not None
    assert after.extra is not None
    used = [extra.bias[0, 0, 0][extra.bias[0, 0, 0] != -torch.inf] for extra in (before.extra, after.extra)]
    assert torch.equal(*used)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment": 100}, "segment=100, cluster=16; set segment to a multiple of cluster, at most 16384"),
        ({"segment": 1 << 15}, "segment=32768"),
        ({"cluster": 0}, "cluster=0"),
        ({"cluster": 32, "segment": 16}, "segment=16, cluster=32"),
        ({"iterations": -1}, "iterations=-1; set it to 0 or more"),
        ({"exact": 0.0}, r"exact=0\.0, estimated=0\.232; they are shares"),
        ({"estimated": 1.5}, r"estimated=1\.5"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"retroinfer: .*{message}"):
        RetroInfer(Options(**options))


# In a model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_budget_that_covers_the_history_generates_what_dense_attention_does(family: str) -> None:
    model = tiny_model(family)
    config = config_of("retroinfer", {"segment": 16, "cluster": 4}, top_k=400)
    for length in (3, 60):
        want, _ = dense_generate(model, prompt(length), 48)
        tokens, cache = generated(model, prompt(length), config, 48)
        assert torch.equal(tokens, want)
        assert cache.request.layers[1].zones[0] >= 32, "generated tokens must have been clustered, too"


def test_a_ragged_batch_gives_each_row_what_it_gets_alone() -> None:
    model = tiny_model("llama")
    config = config_of("retroinfer", {"segment": 16, "cluster": 4, "estimated": 0.1}, top_k=6)
    rows = [prompt(length, seed=length) for length in (3, 41, 150)]
    ids, mask = padded(rows)
    together, _ = generated(model, ids, config, 24, mask)
    for place, row in enumerate(rows):
        alone, _ = generated(model, row, config, 24)
        assert torch.equal(together[place : place + 1], alone)
    dense, _ = dense_generate(model, rows[2], 24)
    assert not torch.equal(together[2:], dense), "a budget that loses something, or the test shows nothing"


def test_the_estimated_zone_brings_the_logits_nearer_to_dense_attentions() -> None:
    model, ids = tiny_model("llama"), prompt(150)
    _, want = dense_generate(model, ids, 2)

    def error(estimated: float) -> float:
        config = config_of("retroinfer", {"segment": 16, "cluster": 4, "estimated": estimated}, top_k=8)
        return float((second_logits(model, ids, config) - want[:, 1]).norm())

    assert error(1.0) < error(0.0)


def second_logits(model: Any, ids: Tensor, config: Config) -> Tensor:
    """The logits [B, V] after the first decode step, the first that retrieves."""
    lm, cache, batch = language_model(model), ParisCache(model, config), Batch(ids)
    first = prefill(lm, cache, batch, 2).argmax(-1, keepdim=True)
    return decode_step(lm, cache, first, batch.positions()[:, -1:] + 1, None).float()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_contract_on_a_gpu(dtype: torch.dtype) -> None:
    check_retriever(RetroInfer(Options(segment=SEGMENT)), lengths=(256, 64, 0), dtype=dtype, device="cuda")


@needs_gpu
def test_replayed_steps_equal_eager_ones() -> None:
    from tests.integration.test_gpu import loop, replayed

    model, ids = tiny_model("llama").cuda(), prompt(150).cuda()
    config = config_of("retroinfer", {"segment": 16, "cluster": 4}, top_k=8)
    assert torch.equal(replayed(model, ids, config, 100)[0], loop(model, ids, config, 100, graph="off"))


def test_it_ships_with_pariskv() -> None:
    registry = Registry.load(entry_points=False)
    assert isinstance(registry.make("retroinfer", {"exact": 0.018}), RetroInfer)
