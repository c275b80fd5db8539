"""The oracle against a definition head by head."""

from __future__ import annotations

import pytest
import torch
from pariskv_plugins.exact import COMBINE, Exact, Options
from pariskv_plugins.keep import keep_best
from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.testing import check_retriever
from pariskv.types import Budget, Codes, LayerInfo, Partial, Query, Rows, Selection

NAMES = [*COMBINE, "per_query_head"]
LENGTHS = [200, 7, 0]


def codes_of(keys: Tensor) -> Codes:
    layer = LayerInfo(0, 3, 2, 3, keys.shape[-1], keys.dtype, keys.device, 1.0)
    codes = Exact().allocate_codes(layer, keys.shape[2])
    codes.append([0, 1, 2], [0, 0, 0], {"keys": keys}, keys.shape[2])
    codes.length.copy_(torch.tensor(LENGTHS, dtype=torch.int32))
    for row, length in enumerate(LENGTHS):
        codes["keys"][row, :, length:] = float("nan")
    return codes


def problem(softcap: float | None = None) -> tuple[Query, Codes, Tensor]:
    """A query, its codes, and the scores [B, H, G, N]."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 210, 64, generator=generator)
    query = Query(torch.randn(3, 2, 3, 64, generator=generator), None, 0.3, softcap)
    scores = query.heads.double() @ keys.double().mT * 0.3
    return query, codes_of(keys), scores if softcap is None else softcap * torch.tanh(scores / softcap)


def budget(count: int, width: int) -> Budget:
    return Budget(width, torch.tensor([min(count, length) for length in LENGTHS], dtype=torch.int32))


def ranking(scores: Tensor, combine: str, softcap: float | None) -> Tensor:
    """Scores [G, N] of one head's tokens combined to [N]."""
    if combine == "mean_query":
        return (scores if softcap is None else torch.atanh(scores / softcap)).mean(0)
    if combine == "max_logit":
        return scores.amax(0)
    probabilities = scores.softmax(-1)
    return probabilities.sum(0) if combine == "sum_softmax" else probabilities.amax(0)


@pytest.mark.parametrize("combine", ["mean_query", "max_logit", "max_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_contract_with_other_ways_to_combine(combine: str, dtype: torch.dtype) -> None:
    check_retriever(Exact(Options(combine)), dtype=dtype, lengths=(300, 16, 0), recall_floor=0.5)


@pytest.mark.parametrize("combine", list(COMBINE))
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_it_chooses_the_best_of_the_combined_scores(combine: str, softcap: float | None) -> None:
    query, codes, scores = problem(softcap)
    got = Exact(Options(combine)).coarse_select(query, codes, budget(20, 25)).indices
    for b, h in ((b, h) for b in range(3) for h in range(2)):
        n = LENGTHS[b]
        best = ranking(scores[b, h, :, :n], combine, softcap).topk(min(20, n)).indices.tolist()
        assert got[b, h].tolist() == sorted(best) + [-1] * (25 - len(best))


@pytest.mark.parametrize("combine", NAMES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_reranking_a_superset_is_choosing_at_once(combine: str, softcap: float | None) -> None:
    exact, (query, codes, _) = Exact(Options(combine)), problem(softcap)
    at_once = exact.coarse_select(query, codes, budget(20, 20))
    for candidates in (exact.coarse_select(query, codes, budget(90, 100)), everything()):
        reranked = exact.rerank(query, candidates, codes, 20)
        assert torch.equal(reranked.indices, at_once.indices)
        assert (reranked.bias is None) == (at_once.bias is None) == (combine != "per_query_head")
        if reranked.bias is not None and at_once.bias is not None:
            assert torch.equal(reranked.bias, at_once.bias)


def everything() -> Selection:
    indices = torch.arange(200, dtype=torch.int32).expand(3, 2, 200)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).view(3, 1, 1)
    return Selection(torch.where(indices < lengths, indices, -1))


def test_query_heads_that_choose_apart_have_a_bias_for_their_own_tokens() -> None:
    query, codes, scores = problem()
    exact = Exact(Options("per_query_head"))
    assert exact.selects_per_query_head
    assert not Exact().selects_per_query_head
    selection = exact.rerank(query, everything(), codes, 10)
    assert selection.indices.shape == (3, 2, 30)
    assert selection.bias is not None
    for b, h, g in ((b, h, g) for b in range(3) for h in range(2) for g in range(3)):
        own = selection.indices[b, h][selection.bias[b, h, g] == 0].tolist()
        n = LENGTHS[b]
        assert own == sorted(scores[b, h, g, :n].topk(min(10, n)).indices.tolist())
    assert bool((selection.bias[selection.indices.unsqueeze(2).expand_as(selection.bias) < 0] == -torch.inf).all())


def test_a_head_chooses_among_the_candidates_that_it_may_attend_to() -> None:
    query, codes, scores = problem()
    offered = Exact(Options("per_query_head")).coarse_select(query, codes, budget(40, 40))
    assert offered.bias is not None
    # Every third of all heads' choices is this head's own.
    own = torch.arange(120).expand_as(offered.bias) % 3 == torch.arange(3).view(3, 1)
    bias = torch.where(own & (offered.indices >= 0).unsqueeze(2), 0.25, -torch.inf)
    final = Exact(Options("per_query_head")).rerank(query, Selection(offered.indices, bias), codes, 5)
    assert final.bias is not None
    for b, h, g in ((b, h, g) for b in range(3) for h in range(2) for g in range(3)):
        candidates = offered.indices[b, h][bias[b, h, g] == 0.25].long()
        best = candidates[scores[b, h, g, candidates].topk(min(5, len(candidates))).indices]
        assert final.indices[b, h][final.bias[b, h, g] == 0.25].tolist() == sorted(best.tolist())


@pytest.mark.parametrize("combine", NAMES)
def test_of_no_candidates_none_is_chosen(combine: str) -> None:
    query, codes, _ = problem()
    one = torch.zeros(3, 2, 3, 64)
    nothing = Selection(torch.zeros(3, 2, 0, dtype=torch.int32), one[..., :0], partial=Partial(one, one[..., 0]))
    for candidates in (nothing, Selection(nothing.indices)):
        chosen = Exact(Options(combine)).rerank(query, candidates, codes, 5)
        assert bool((chosen.indices == -1).all())
        assert chosen.partial is candidates.partial


def test_far_tokens_are_still_ranked_by_their_probability() -> None:
    keys = torch.zeros(1, 1, 10, 64)
    keys[0, 0, :, 0] = torch.tensor([0.0, 1000, -900, -300, -200, -1000, -400, -500, -600, -700])
    codes = Exact().allocate_codes(LayerInfo(0, 1, 1, 1, 64, keys.dtype, keys.device, 1.0), 10)
    codes.append([0], [0], {"keys": keys}, 10)
    codes.length.fill_(10)
    heads = torch.zeros(1, 1, 1, 64)
    heads[..., 0] = 1
    got = Exact().coarse_select(Query(heads, None, 1.0), codes, Budget(4, torch.tensor([4], dtype=torch.int32)))
    assert got.indices.tolist() == [[[0, 1, 3, 4]]]  # all but one of the probabilities are 0 in float32


def test_an_unknown_combine_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match="combine='sum_votes'; set it to one of mean_query, max_logit, sum_softmax"):
        Exact(Options("sum_votes"))


def test_keep_best_keeps_bias_extra_and_partial() -> None:
    indices = torch.tensor([[[5, -1, 7, 9]]], dtype=torch.int32)
    bias = torch.tensor([[[[0.5, 9.0, 0.7, 0.9]]]])
    one = torch.zeros(1, 1, 1, 64)
    given = Selection(indices, bias, Rows(one, one, bias[..., :1]), Partial(one, one[..., 0]))
    kept = keep_best(given, torch.tensor([[[3.0, 8.0, 1.0, 2.0]]]), 2)
    assert kept.indices.tolist() == [[[5, 9]]]
    assert kept.bias is not None
    torch.testing.assert_close(kept.bias, torch.tensor([[[[0.5, 0.9]]]]))
    assert kept.extra is given.extra
    assert kept.partial is given.partial
    wide = keep_best(given, torch.tensor([[[3.0, 8.0, 1.0, 2.0]]]), 5)
    assert wide.indices.tolist() == [[[5, 7, 9, -1, -1]]]
    assert wide.bias is not None
    assert wide.bias[0, 0, 0, 3:].tolist() == [-torch.inf, -torch.inf]
