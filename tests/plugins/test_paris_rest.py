"""`pariskv` with `rest: gaussian`: what is not fetched is estimated, and what is found stays what it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pariskv_plugins.paris import Options, ParisKV
from pariskv_plugins.paris.frame import learn_frame
from torch import Tensor

from pariskv.attention import attend
from pariskv.metrics import relative_error
from pariskv.testing import check_retriever
from pariskv.testing.stores import working_set
from pariskv.types import LayerInfo, Partial, Query, Selected, Selection
from tests.plugins.driving import budget_of, filled, layer_of
from tests.plugins.test_paris_framed import CAPACITY, LENGTHS, Prompt, problem, skew

TOP_K, D, N = 32, 64, 2000


class Described(Prompt):
    """A prompt whose values are not its keys."""

    def __init__(self, layer: LayerInfo, keys: Tensor, values: Tensor, lengths: list[int], blocks: int = 2) -> None:
        super().__init__(layer, keys, lengths, blocks=blocks)
        self.values = values

    def blocks(self, row: int) -> Any:
        start = 0
        for keys, _ in super().blocks(row):
            yield keys, self.values[row, :, start : start + keys.shape[1]]
            start += keys.shape[1]


def keys_and_values(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys [1, 1, N, D] with a mean far from 0, values that go with them in part."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 1, N, D, generator=generator)
    go_with = torch.randn(D, D, generator=generator) / D**0.5
    values = keys @ go_with + torch.randn(1, 1, N, D, generator=generator) + 0.5
    return keys @ skew(D, 1) + 3 * torch.randn(1, 1, 1, D, generator=generator), values


def attended(query: Query, keys: Tensor, values: Tensor, selection: Selection | None) -> Tensor:
    """Attention to what is selected, or to everything; there is neither sink nor ring."""
    indices = torch.arange(keys.shape[2]).view(1, 1, -1) if selection is None else selection.indices.long()
    at = indices.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
    rows = torch.stack((keys.gather(2, at), values.gather(2, at)), dim=3)
    nothing = torch.zeros(1, 0, dtype=torch.bool)
    partial = None if selection is None else selection.partial
    return attend(query, working_set(rows, nothing), Selected(indices >= 0, partial=partial))[0]


def selected(
    queries: Tensor, keys: Tensor, values: Tensor, top_k: int = TOP_K, **options: Any
) -> tuple[Query, Selection]:
    """What the retriever selects for the queries [1, 1, G, D] of the tokens, 10 % of which are candidates."""
    layer, retriever = layer_of(1, 1, queries.shape[2], D), ParisKV(Options(**{"rest": "gaussian", **options}))
    state = retriever.fit(layer, Described(layer, keys, values, [keys.shape[2]]))
    codes = filled(retriever, layer, keys, [keys.shape[2]], state)
    query = Query(queries, retriever.encode_query(queries, state), 0.125)
    budget = budget_of([max(200, top_k)], max(200, top_k))
    return query, retriever.rerank(query, retriever.coarse_select(query, codes, budget), codes, top_k)


@pytest.mark.parametrize("combine", ["sum_softmax", "mean_query"])
@pytest.mark.parametrize("centre", ["prefill", "none"])
def test_the_output_comes_nearer_to_dense_attention(combine: str, centre: str) -> None:
    errors: dict[str, float] = {"none": 0.0, "gaussian": 0.0}
    for seed in range(4):
        keys, values = keys_and_values(seed)
        queries = 0.7 * torch.randn(1, 1, 3, D, generator=torch.Generator().manual_seed(seed + 50))
        for rest in errors:
            query, selection = selected(queries, keys, values, rest=rest, combine=combine, centre=centre)
            wanted = attended(query, keys, values, None)
            errors[rest] += float(relative_error(attended(query, keys, values, selection), wanted).mean()) / 4
    assert errors["gaussian"] < 0.6 * errors["none"], errors


def test_the_same_tokens_are_selected() -> None:
    keys, values = keys_and_values()
    queries = torch.randn(1, 1, 3, D, generator=torch.Generator().manual_seed(9))
    (_, with_rest), (_, without) = (selected(queries, keys, values, rest=rest) for rest in ("gaussian", "none"))
    assert torch.equal(with_rest.indices, without.indices)
    assert without.partial is None


def test_a_head_that_looks_at_one_token_loses_nothing_of_it() -> None:
    keys, values = keys_and_values()
    direction = torch.nn.functional.normalize(keys[0, 0, 700] - keys[0, 0].mean(0), dim=0)
    keys[0, 0, 700] = keys[0, 0].mean(0) + 40 * direction
    queries = (20 * direction).expand(1, 1, 2, D).contiguous()
    query, selection = selected(queries, keys, values)
    assert 700 in selection.indices[0, 0].tolist()
    found = attended(query, keys, values, selection)
    torch.testing.assert_close(found, values[:, :, 700:701].expand_as(found), rtol=1e-3, atol=1e-3)


def test_of_everything_selected_nothing_is_left_to_estimate() -> None:
    keys, values = keys_and_values()
    query, selection = selected(torch.ones(1, 1, 2, D), keys, values, top_k=N)
    assert selection.partial is not None
    assert bool((selection.partial.lse == -torch.inf).all())
    torch.testing.assert_close(
        attended(query, keys, values, selection), attended(query, keys, values, None), rtol=1e-4, atol=1e-5
    )


def test_what_the_values_are_like_does_not_depend_on_the_blocks() -> None:
    keys, values = keys_and_values()
    layer = layer_of(1, 1, 3, D)
    few, many = (
        learn_frame(
            layer,
            Described(layer, keys, values, [N], blocks=blocks),
            "prefill",
            "none",
            1.0,
            False,
            42,
            with_values=True,
        )
        for blocks in (1, 9)
    )
    centred = (one[0, 0].double() - one[0, 0].double().mean(0) for one in (keys, values))
    wanted = next(centred).mT @ next(centred) / N
    torch.testing.assert_close(few["slopes"][0, 0].double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(few["mean_value"], values.mean(2))
    for name in ("slopes", "mean_value"):
        torch.testing.assert_close(many[name], few[name], rtol=0, atol=1e-6)


def test_a_row_is_estimated_as_it_is_alone_and_one_without_a_zone_not_at_all() -> None:
    retriever, query, codes, keys, _ = problem(rest="gaussian")
    candidates = retriever.coarse_select(query, codes, budget_of([300, 70, 0], 300))
    together = retriever.rerank(query, candidates, codes, 20).partial
    assert together is not None
    assert bool(together.out.isfinite().all())
    assert bool((together.lse[2] == -torch.inf).all())
    layer, view = layer_of(1, 2, 3, D), Prompt(layer_of(3, 2, 3, D), keys, LENGTHS)
    for name in ("query_moment", "recent_queries", "newest", "keys", "lengths"):
        setattr(view, name, getattr(view, name)[1:2])
    state = retriever.fit(layer, view)
    own = filled(retriever, layer, keys[1:2, :, :CAPACITY], LENGTHS[1:2], state)
    assert query.steady is not None
    heads = query.heads[1:2]
    asked = replace(query, heads=heads, encoded=retriever.encode_query(heads, state), steady=query.steady[1:2])
    alone = retriever.rerank(asked, Selection(candidates.indices[1:2]), own, 20).partial
    assert alone is not None
    torch.testing.assert_close(together.out[1:2], alone.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together.lse[1:2], alone.lse, rtol=1e-4, atol=1e-4)


def test_a_partial_attention_of_the_stage_before_is_kept() -> None:
    retriever, query, codes, *_ = problem(rest="gaussian")
    candidates = retriever.coarse_select(query, codes, budget_of([300, 70, 0], 300))
    before = Partial(torch.ones(3, 2, 3, D), torch.full((3, 2, 3), 90.0))
    got = retriever.rerank(query, replace(candidates, partial=before), codes, 20).partial
    assert got is not None
    torch.testing.assert_close(got.out, before.out)
    torch.testing.assert_close(got.lse, before.lse)


@pytest.mark.parametrize("options", [{"rest": "none"}, {"combine": "mean_query"}, {"centre": "none"}])
def test_it_keeps_the_contract(options: dict[str, Any]) -> None:
    retriever = ParisKV(Options(**{"rest": "gaussian", **options}))
    check_retriever(retriever, lengths=(700, 16, 0))
    check_retriever(retriever, head_dim=80, group=1, kv_heads=1, dtype=torch.bfloat16)
