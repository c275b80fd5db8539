"""`pariskv` with `min_share`: of the best `top_k` rows, those that are estimated to have enough of the attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_kernels.rerank import estimate_scores_by_head
from pariskv_plugins.paris import Options, ParisKV
from pariskv_plugins.resident import Resident
from tiny_models import dense_generate, prompt, tiny_model

from pariskv.errors import ConfigError
from pariskv.testing import check_retriever
from tests.plugins.driving import budget_of, config_of, generated, layer_of, padded
from tests.plugins.test_graph_safe import no_host
from tests.plugins.test_paris_framed import CAPACITY, LENGTHS, problem

TOP_K = 40


@pytest.mark.parametrize("combine", ["sum_softmax", "max_softmax"])
@pytest.mark.parametrize(("min_share", "softcap"), [(1e-3, None), (1e-2, None), (1e-3, 400.0)])
def test_rows_with_less_of_the_attention_are_not_fetched(combine: str, min_share: float, softcap: float | None) -> None:
    retriever, query, codes, *_ = problem(combine=combine, min_share=min_share)
    query = replace(query, softcap=softcap)
    candidates = retriever.coarse_select(query, codes, budget_of([300, 70, 0], 300))
    got = retriever.rerank(query, candidates, codes, TOP_K).indices
    assert got.shape == (3, 2, TOP_K)
    assert query.encoded is not None
    assert query.steady is not None
    heads, offset = query.encoded["heads"], query.encoded["offset"]
    scores = estimate_scores_by_head(heads, codes["codes"], codes["weights"], candidates.indices)
    scores = (scores + offset.unsqueeze(3)) * query.scaling
    if softcap is not None:
        scores = torch.where(scores > -torch.inf, softcap * torch.tanh(scores / softcap), -torch.inf)
    shares = torch.cat((scores, query.steady.unsqueeze(3)), dim=3).double().softmax(3)[..., :-1]
    shares = shares.mean(2) if combine == "sum_softmax" else shares.amax(2)
    sizes = []
    for row, head in itertools.product((0, 1), range(2)):
        enough = shares[row, head] >= min_share
        best = shares[row, head].topk(TOP_K).indices
        wanted = candidates.indices[row, head][best[enough[best]]].sort().values.tolist()
        sizes.append(len(wanted))
        assert got[row, head].tolist() == wanted + [-1] * (TOP_K - len(wanted))
    assert min(sizes) < TOP_K
    assert max(sizes) > 0
    assert LENGTHS[2] == 0
    assert got[2].tolist() == [[-1] * TOP_K] * 2


def test_without_it_every_slot_is_used() -> None:
    retriever, query, codes, *_ = problem()
    candidates = retriever.coarse_select(query, codes, budget_of([300, 70, 0], 300))
    assert bool((retriever.rerank(query, candidates, codes, TOP_K).indices[:2] >= 0).all())


@pytest.mark.parametrize("combine", ["sum_softmax", "max_softmax"])
def test_it_keeps_the_contract_and_may_keep_fewer_than_top_k(combine: str) -> None:
    retriever = ParisKV(Options(min_share=0.02, combine=combine))
    assert retriever.adapts_top_k
    assert not ParisKV().adapts_top_k
    check_retriever(retriever, lengths=(700, 16, 0))
    check_retriever(retriever, head_dim=80, group=1, kv_heads=1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_share": -0.1}, r"pariskv: min_share=-0\.1; set it to a number from 0 \(top_k rows\) to below 1"),
        ({"min_share": 1.0}, r"pariskv: min_share=1\.0; set it to"),
        ({"min_share": float("nan")}, r"pariskv: min_share=nan; set it to"),
        (
            {"min_share": 0.1, "combine": "max_logit"},
            "combine=max_logit, whose scores are no shares of attention; set combine to sum_softmax or max_softmax",
        ),
    ],
)
def test_an_invalid_share_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParisKV(Options(**options))


def test_a_step_never_asks_the_host() -> None:
    retriever, query, codes, keys, _ = problem(min_share=0.01)
    resident, budget = Resident(), budget_of([50, 20, 0], 50)
    store, slots = resident.allocate_store(layer_of(3, 2, 3, 64), CAPACITY), torch.zeros(3, 2, 20, 2, 64)
    resident.update(keys, keys, store, [0, 1, 2])
    retriever.rerank(query, retriever.coarse_select(query, codes, budget), codes, 20)  # compiled once
    with no_host():
        selection = retriever.rerank(query, retriever.coarse_select(query, codes, budget), codes, 20)
        valid = resident.fetch(selection, store, slots).valid
    assert not bool(valid[:2].all())
    assert bool(valid.any())


def test_a_ragged_batch_generates_what_its_rows_generate_alone_over_several_updates() -> None:
    model = tiny_model("llama", torch.float32)
    rows = [prompt(90), prompt(59, seed=1)]
    config = config_of("pariskv", {"min_share": 0.01}, top_k=30, candidates=0.5)
    together, cache = generated(model, padded(rows)[0], config, 24, padded(rows)[1])
    assert [layer.zones for layer in cache.request.layers.values()] == [[96, 64]] * len(cache.request.layers)
    layers = list(cache.request.layers.values())
    used = torch.stack([layer.selected.sum(-1) / layer.steps for layer in layers])
    assert 0 < float(used.min()) < float(used.max()) <= 30
    for row, one in enumerate(rows):
        alone, _ = generated(model, one, config, 24)
        assert torch.equal(together[row], alone[0])


def test_a_share_that_everything_has_changes_nothing() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    config = config_of("pariskv", {"min_share": 1e-30}, top_k=500, candidates=1.0)
    assert torch.equal(generated(model, ids, config, 24)[0], dense_generate(model, ids, 24)[0])
