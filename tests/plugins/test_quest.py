"""Quest against its formula, page by page and head by head."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pariskv_plugins.exact import COMBINE, Exact
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.quest import Options, Quest, least_and_most
from pariskv_plugins.resident import Resident
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.testing import check_retriever
from pariskv.types import Codes, Query, Selection
from tests.plugins.driving import budget_of, config_of, filled, generated, layer_of, needs_gpu, padded
from tests.plugins.test_graph_safe import no_host

PER_HEAD = "per_query_head"
NAMES = [PER_HEAD, *COMBINE]
LENGTHS = [160, 32, 0]
PAGE = 16


def problem(combine: str, softcap: float | None = None) -> tuple[Quest, Query, Codes, Tensor]:
    """A ragged batch of three rows, 2 key/value heads and groups of 3: quest, query, codes, keys [B, H, N, D]."""
    generator = torch.Generator().manual_seed(0)
    keys, heads = (torch.randn(3, 2, n, 64, generator=generator) for n in (192, 3))
    quest = Quest(Options(combine=combine))
    return quest, Query(heads, None, 0.3, softcap), filled(quest, layer_of(3, 2, 3, 64), keys, LENGTHS, {}), keys


def bound_by_hand(head: Tensor, page: Tensor) -> float:
    """UB of one query [D] and one page's keys [n, D], as the paper writes it."""
    pairs = zip(head.tolist(), page.amin(0).tolist(), page.amax(0).tolist(), strict=True)
    return sum(max(q * least, q * most) for q, least, most in pairs)


def ranking(query: Query, keys: Tensor, combine: str) -> Tensor:
    """The ranking of the pages of one head's keys [N, D] for its group's queries `query.heads` [G, D]: [pages]."""
    heads = query.heads.mean(0, keepdim=True) if combine == "mean_query" else query.heads
    pages = keys.split(PAGE) if len(keys) else ()
    scores = query.scaling * torch.tensor([[bound_by_hand(head, page) for page in pages] for head in heads]).double()
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    if combine in ("mean_query", "max_logit"):
        return scores.amax(0)
    probabilities = scores.softmax(-1)
    return probabilities.sum(0) if combine == "sum_softmax" else probabilities.amax(0)


def tokens_of(pages: list[int]) -> list[int]:
    return [page * PAGE + offset for page in sorted(pages) for offset in range(PAGE)]


# The bound

small = st.integers(-8, 8)  # their products and sums are exact in float32


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_the_bound_is_the_papers_and_never_below_the_best_score_of_its_page(
    data: st.DataObject, size: int, pages: int, dim: int, group: int
) -> None:
    keys = torch.tensor(data.draw(st.lists(small, min_size=pages * size * dim, max_size=pages * size * dim))).float()
    heads = torch.tensor(data.draw(st.lists(small, min_size=group * dim, max_size=group * dim))).float()
    keys, heads = keys.view(1, 1, pages * size, dim), heads.view(1, 1, group, dim)
    quest = Quest(Options(size))
    codes = filled(quest, layer_of(1, 1, group, dim), keys, [pages * size], {})
    bounds, numbers = quest.upper_bounds(Query(heads, None, 1.0), codes)
    best = (heads @ keys.mT).view(1, 1, group, pages, size).amax(-1)
    assert bool((bounds >= best).all())
    if size == 1:
        assert torch.equal(bounds, best)
    by_hand = [[bound_by_hand(head, page) for page in keys[0, 0].split(size)] for head in heads[0, 0]]
    assert bounds[0, 0].tolist() == by_hand
    assert numbers.tolist() == [[[*range(pages)]]]


def test_the_bound_of_a_softcapped_score_is_softcapped() -> None:
    quest, query, codes, keys = problem(PER_HEAD, softcap=2.0)
    scores = 2.0 * torch.tanh(query.heads[:1] @ keys[:1, :, :160].mT * 0.3 / 2.0)
    bounds, _ = quest.upper_bounds(query, codes)
    best = scores.unflatten(-1, (-1, PAGE)).amax(-1)
    assert bool((bounds[:1, ..., :10] >= best - 1e-6).all())
    assert bool((bounds[:1, ..., :10] <= 2.0).all())


def test_pages_that_are_appended_later_are_as_exact_as_the_first() -> None:
    quest, _, codes, keys = problem(PER_HEAD)
    late = quest.allocate_codes(layer_of(3, 2, 3, 64), 192)
    for start in range(0, 160, PAGE):
        block = keys[:1, :, start : start + PAGE]
        late.append([0], [start], quest.encode(block, block, {}), PAGE)
    assert torch.equal(late["bounds"][0, :, :10], codes["bounds"][0, :, :10])


def test_a_key_of_128_costs_32_bytes() -> None:
    assert Quest().allocate_codes(layer_of(1, 1, 1, 128, torch.bfloat16), 1600).nbytes == 32 * 1600


# The choice


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("combine", list(COMBINE))
def test_a_key_value_head_takes_the_pages_that_rank_highest_by_hand(combine: str, softcap: float | None) -> None:
    quest, query, codes, keys = problem(combine, softcap)
    assert not quest.selects_per_query_head
    selection = quest.coarse_select(query, codes, budget_of([67, 32, 0], 70))
    assert selection.bias is None
    for b, h in itertools.product(range(3), range(2)):
        alone = Query(query.heads[b, h], None, query.scaling, softcap)
        pages = LENGTHS[b] // PAGE
        best = ranking(alone, keys[b, h, : LENGTHS[b]], combine).topk(min(4, pages)).indices.tolist()
        want = tokens_of(best)
        assert selection.indices[b, h].tolist() == want + [-1] * (70 - len(want))


def test_query_heads_take_their_own_pages_and_attend_to_these_alone() -> None:
    quest, query, codes, keys = problem(PER_HEAD)
    assert quest.selects_per_query_head
    selection = quest.coarse_select(query, codes, budget_of([48, 32, 0], 48))
    assert selection.indices.shape == (3, 2, 3 * 48)
    assert selection.bias is not None
    differ = 0
    for b, h in itertools.product(range(3), range(2)):
        pages = LENGTHS[b] // PAGE
        own = []
        for g in range(3):
            alone = Query(query.heads[b, h, g : g + 1], None, query.scaling)
            best = ranking(alone, keys[b, h, : LENGTHS[b]], "max_logit").topk(min(3, pages)).indices.tolist()
            own.append(tokens_of(best))
            assert selection.indices[b, h][selection.bias[b, h, g] == 0].tolist() == own[-1]
        union = sorted(set(itertools.chain(*own)))
        differ += union != own[0]
        assert [token for token in selection.indices[b, h].tolist() if token >= 0] == union
    assert differ, "heads that all agree show nothing"
    empty = selection.indices.unsqueeze(2).expand_as(selection.bias) < 0
    assert bool((selection.bias[empty] == -torch.inf).all())
    assert set(selection.bias.unique().tolist()) == {0.0, -torch.inf}


@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (15, 15), (16, 16), (31, 16), (32, 32), (47, 32), (160, 160)])
@pytest.mark.parametrize("combine", [PER_HEAD, "max_logit"])
def test_a_budget_is_whole_pages_and_never_exceeded(combine: str, count: int, tokens: int) -> None:
    quest, query, codes, _ = problem(combine)
    selection = quest.coarse_select(query, codes, budget_of([count, min(count, 32), 0], count))
    chosen = selection.indices >= 0
    if selection.bias is None:
        assert (chosen.sum(-1)[0] == tokens).all()
    else:
        assert ((selection.bias == 0).sum(-1)[0] == tokens).all()
    assert (chosen.sum(-1)[2] == 0).all()


def test_rows_of_a_ragged_batch_choose_what_they_choose_alone() -> None:
    for combine in NAMES:
        quest, query, codes, keys = problem(combine)
        together = quest.coarse_select(query, codes, budget_of([64, 32, 0], 64))
        for row in range(3):
            own = filled(quest, layer_of(1, 2, 3, 64), keys[row : row + 1], [LENGTHS[row]], {})
            alone = quest.coarse_select(
                Query(query.heads[row : row + 1], None, 0.3), own, budget_of([min(64, LENGTHS[row])], 64)
            )
            assert torch.equal(together.indices[row : row + 1], alone.indices)


# The contract


@pytest.mark.parametrize("combine", NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_it_keeps_the_contract_with_every_option(combine: str, page_size: int) -> None:
    check_retriever(Quest(Options(page_size, combine)), lengths=(130, 16, 0), top_k=20)


def test_pages_of_one_token_are_the_oracle() -> None:
    check_retriever(Quest(Options(1, "sum_softmax")), recall_floor=1.0)


@pytest.mark.parametrize("combine", NAMES)
def test_a_step_never_asks_the_host(combine: str) -> None:
    quest, query, codes, keys = problem(combine)
    resident, layer = Resident(), layer_of(3, 2, 3, 64)
    store = resident.allocate_store(layer, 192)
    resident.update(keys[:, :, :160], keys[:, :, :160], store, [0, 1, 2])
    budget, slots = budget_of([48, 32, 0], 50), torch.zeros(3, 2, 150, 2, 64)

    def step() -> Tensor:
        selection = quest.coarse_select(query, codes, budget)
        return resident.fetch(selection, store, slots[:, :, : selection.indices.shape[2]]).valid

    assert quest.graph_safe
    warmed_up = step()
    with no_host():
        again = step()
    assert torch.equal(again, warmed_up)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "quest: page_size=0; set it to an integer from 1"),
        ({"page_size": 16.0}, r"quest: page_size=16\.0; set it to an integer from 1"),
        ({"page_size": True}, "quest: page_size=True; set it to an integer from 1"),
        ({"combine": "sum_votes"}, "quest: combine='sum_votes'; set it to one of per_query_head, mean_query"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Quest(Options(**options))


# With others


@pytest.mark.parametrize("combine", [PER_HEAD, "max_logit"])
@pytest.mark.parametrize("reranker", [ParisPaper, Exact])
def test_its_candidates_can_be_reranked_by_another(reranker: type, combine: str) -> None:
    quest, query, codes, keys = problem(combine)
    other = reranker()
    candidates = quest.coarse_select(query, codes, budget_of([80, 32, 0], 80))
    encoded = other.encode_query(query.heads, {}) if reranker is ParisPaper else None
    reading = filled_without_nan(other, keys)
    final: Selection = other.rerank(Query(query.heads, encoded, 0.3), candidates, reading, 10)
    assert final.indices.shape == (3, 2, 10)
    assert (final.bias is not None) == (combine == PER_HEAD)
    for b, h in itertools.product(range(3), range(2)):
        chosen = set(final.indices[b, h].tolist()) - {-1}
        assert chosen <= set(candidates.indices[b, h].tolist())
        assert len(chosen) == (10 if b < 2 else 0)
        if reranker is Exact:
            offered = sorted(set(candidates.indices[b, h].tolist()) - {-1})
            scores = (query.heads[b, h] @ keys[b, h, : LENGTHS[b]].mT * 0.3).softmax(-1).sum(0)
            best = [offered[i] for i in scores[offered].topk(min(10, len(offered))).indices.tolist()]
            assert chosen == set(best)


def filled_without_nan(retriever: Any, keys: Tensor) -> Codes:
    codes: Codes = retriever.allocate_codes(layer_of(3, 2, 3, 64), 192)
    codes.append([0, 1, 2], [0, 0, 0], retriever.encode(keys, keys, {}), 192)
    codes.length.copy_(torch.tensor(LENGTHS, dtype=torch.int32))
    return codes


# In a model

NEW = 40


@pytest.mark.parametrize("combine", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_budget_that_covers_the_history_is_dense_attention(family: str, combine: str) -> None:
    model, ids = tiny_model(family), prompt(90)
    want, _ = dense_generate(model, ids, NEW)
    options = {"page_size": 8, "combine": combine}
    got, cache = generated(model, ids, config_of("quest", options, top_k=400), NEW)
    assert torch.equal(got, want)
    assert cache.request.layers[1].zones[0] >= 100
    assert int(cache.request.layers[1].selected.sum()) > 0


def test_a_small_budget_of_a_ragged_batch_gives_each_row_what_it_gets_alone() -> None:
    model, rows = tiny_model("llama"), [prompt(n, seed=n) for n in (3, 41, 70)]
    config = config_of("quest", {"page_size": 4}, top_k=8)
    ids, mask = padded(rows)
    together, _ = generated(model, ids, config, NEW, mask)
    for row, alone in enumerate(rows):
        assert torch.equal(together[row], generated(model, alone, config, NEW)[0][0]), f"row {row}"
    dense, _ = dense_generate(model, rows[2], NEW)
    assert not torch.equal(together[2:], dense), "a budget that loses something, or the test shows nothing"


def test_pariskv_reranks_its_candidates_beside_dense_first_layers() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    want, _ = dense_generate(model, ids, NEW)
    layers = {"0": {"retriever": "dense"}}
    config = config_of("quest", {"page_size": 4}, layers, rerank="pariskv", candidates=1.0, top_k=400)
    got, cache = generated(model, ids, config, NEW)
    assert torch.equal(got, want)
    assert sorted(cache.request.layers[1].codes) == ["it", "pariskv"]
    assert cache.request.layers[0].codes == {}
    small = config_of("quest", {"page_size": 4}, layers, rerank="pariskv", candidates=0.5, top_k=8)
    assert generated(model, ids, small, NEW)[0].shape == (1, NEW)


# On a device


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_bounds_pages_as_the_cpu_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, heads = (torch.randn(2, 2, n, 80, generator=generator).to(dtype) for n in (320, 3))
    bounds = Quest().encode(keys, keys, {})["bounds"]
    want = least_and_most(heads.float(), bounds)
    got = least_and_most(heads.cuda().float(), bounds.cuda())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)  # other orders of summation


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("combine", NAMES)
def test_captured_steps_on_the_device_generate_what_the_cpu_does(combine: str) -> None:
    model, ids = tiny_model("llama"), prompt(90)
    config = config_of("quest", {"page_size": 4, "combine": combine}, top_k=8)
    want, _ = generated(model, ids, config, NEW)
    assert torch.equal(generated(model.cuda(), ids.cuda(), config, NEW)[0], want)
