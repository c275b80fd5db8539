"""`attend` and dense attention against the formula written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pariskv.attention import attend, dense_attention, merge
from pariskv.testing.stores import working_set
from pariskv.types import Partial, Query, Rows, Selected, WorkingSet

B, H, G, D, STEADY, K = 2, 3, 4, 16, 7, 5


def written_out(heads: Tensor, keys: Tensor, values: Tensor, bias: Tensor, softcap: float | None) -> Tensor:
    """Softmax row by row in float64: heads [G, D], keys [n, D], bias [G, n]."""
    scores = heads.double() @ keys.double().T * D**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores + bias, -1) @ values.double()


def a_step(seed: int = 0) -> tuple[Query, WorkingSet, Selected]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(B, H, STEADY + K, 2, D, generator=generator, dtype=torch.float64)
    steady = torch.tensor([[True] * 4 + [False] * 3, [True, False] * 3 + [True]])
    valid = torch.rand(B, H, K, generator=generator) > 0.4
    heads = torch.randn(B, H, G, D, generator=generator, dtype=torch.float64)
    return Query(heads, None, D**-0.5), working_set(rows, steady), Selected(valid)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attend_is_one_softmax_over_the_valid_rows(softcap: float | None, with_bias: bool) -> None:
    query, working, selected = a_step()
    bias = torch.randn(B, H, G, K, dtype=torch.float64) if with_bias else torch.zeros(B, H, G, K, dtype=torch.float64)
    if with_bias:
        bias[:, :, 1, 2] = -math.inf
    selected = Selected(selected.valid, bias if with_bias else None)
    out, _ = attend(Query(query.heads, None, query.scaling, softcap), working, selected)
    for b in range(B):
        for h in range(H):
            used = torch.cat((working.steady[b], selected.valid[b, h]))
            rows = working.rows[b, h, used]
            all_bias = torch.cat((torch.zeros(G, STEADY, dtype=torch.float64), bias[b, h]), -1)[:, used]
            want = written_out(query.heads[b, h], rows[:, 0], rows[:, 1], all_bias, softcap)
            torch.testing.assert_close(out[b, h], want)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_in_unused_slots_never_reaches_the_output(poison: float) -> None:
    query, working, selected = a_step()
    clean, clean_lse = attend(query, working, selected)
    used = torch.cat((working.steady.unsqueeze(1).expand(B, H, -1), selected.valid), -1)
    working.rows[~used] = poison
    out, lse = attend(query, working, selected)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)


def test_without_a_selection_only_sink_and_ring_are_attended() -> None:
    query, working, selected = a_step()
    none_valid = Selected(torch.zeros_like(selected.valid))
    torch.testing.assert_close(attend(query, working, none_valid)[0], attend(query, working, None)[0])


def test_extra_rows_join_the_same_softmax() -> None:
    query, working, selected = a_step()
    extra = Rows(torch.randn(B, H, 2, D).double(), torch.randn(B, H, 2, D).double(), torch.randn(B, H, G, 2).double())
    extra.bias[:, :, :, 1] = -math.inf
    extra.keys[:, :, 1] = extra.values[:, :, 1] = math.nan
    out, lse = attend(query, working, Selected(selected.valid, None, extra))
    alone, alone_lse = attend(query, working, selected)
    scores = query.heads @ extra.keys[:, :, :1].transpose(-1, -2) * D**-0.5 + extra.bias[..., :1]
    part = Partial(extra.values[:, :, :1].expand(B, H, G, D), scores.squeeze(-1))
    want, want_lse = merge(Partial(alone, alone_lse), part)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_a_partial_attention_is_merged_by_its_log_sum_exp() -> None:
    query, working, selected = a_step()
    whole, whole_lse = attend(query, working, selected)
    steady_only, steady_lse = attend(query, working, None)
    no_steady = working_set(working.rows, torch.zeros_like(working.steady))
    part, part_lse = attend(query, no_steady, selected)
    merged = Selected(torch.zeros_like(selected.valid), partial=Partial(part, part_lse))
    out, lse = attend(query, working, merged)
    assert not torch.equal(steady_only, whole)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    assert torch.isfinite(steady_lse).all()


@pytest.mark.parametrize("queries", [1, 3, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_dense_attention_is_causal_softmax(queries: int, softcap: float | None, masked: bool) -> None:
    n = queries + 9
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, queries, D, generator=generator).double()
    k, v = (torch.randn(2, 2, n, D, generator=generator).double() for _ in range(2))
    allowed = torch.ones(queries, n, dtype=torch.bool).tril(n - queries).expand(2, 1, -1, -1).clone()
    if masked:
        allowed[1, :, :, :4] = False
    got = dense_attention(q, k, v, allowed if masked else None, 0.3, softcap)
    scores = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    want = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1) @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(got, want)


def test_sinks_take_their_share_of_the_softmax() -> None:
    q, k, v = torch.randn(1, 2, 5, D).double(), torch.randn(1, 2, 5, D).double(), torch.randn(1, 2, 5, D).double()
    sinks = torch.tensor([0.5, -1.0]).double()
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    with_sink = torch.cat((scores, sinks.view(1, 2, 1, 1).expand(1, 2, 5, 1)), -1)
    want = torch.softmax(with_sink, -1)[..., :-1] @ v
    torch.testing.assert_close(dense_attention(q, k, v, None, 0.25, sinks=sinks), want)


def test_float16_scores_do_not_overflow() -> None:
    heads = torch.full((1, 1, 1, 128), 30.0).half()
    rows = torch.full((1, 1, 4, 2, 128), 30.0).half()
    rows[..., 1, :] = 2.0
    query = Query(heads, None, 128**-0.5)
    out, _ = attend(query, working_set(rows, torch.ones(1, 4, dtype=torch.bool)), None)
    assert torch.equal(out, torch.full_like(out, 2.0))
