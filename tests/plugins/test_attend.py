"""The retriever `numba` against the `attend` in torch, here by the kernels' definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pariskv_plugins.attend import NumbaAttend
from torch import Tensor

from pariskv.attention import attend
from pariskv.registry import Registry
from pariskv.testing.stores import working_set
from pariskv.types import Partial, Query, Rows, Selected, WorkingSet

B, H, G, D, STEADY, K = 2, 3, 4, 16, 7, 5


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def a_step(dtype: torch.dtype) -> tuple[Query, WorkingSet, Selected]:
    """A third of the slots holds no row but NaN, and behind them are slots that the selection leaves alone."""
    steady = random(B, STEADY, seed=1, dtype=dtype) > -0.5
    valid = random(B, H, K, seed=2, dtype=dtype) > -0.5
    rows = random(B, H, 2, STEADY + K + 2, D, seed=3, dtype=dtype).transpose(2, 3)
    rows[:, :, :STEADY][~steady.unsqueeze(1).expand(B, H, -1)] = math.nan
    rows[:, :, STEADY : STEADY + K][~valid] = rows[:, :, STEADY + K :] = math.nan
    query = Query(random(B, H, G, D, seed=4, dtype=dtype), None, D**-0.5)
    return query, working_set(rows, steady), Selected(valid)


def bias_of(width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Every fourth row was chosen by some query heads only."""
    bias = random(B, H, G, width, seed=seed, dtype=dtype)
    bias[:, :, 1:, ::4] = -math.inf
    return bias


def extra_rows(dtype: torch.dtype) -> Rows:
    """Three rows, of which no query head uses the last, which is NaN."""
    keys, values = (random(B, H, 3, D, seed=seed, dtype=dtype) for seed in (5, 6))
    bias = bias_of(3, 7, dtype)
    bias[..., 2] = -math.inf
    keys[:, :, 2] = values[:, :, 2] = math.nan
    return Rows(keys, values, bias)


def partial_attention(dtype: torch.dtype) -> Partial:
    """Done elsewhere; one query head found nothing there."""
    lse = random(B, H, G, seed=8, dtype=torch.promote_types(dtype, torch.float32))
    lse[:, :, 0] = -math.inf
    return Partial(random(B, H, G, D, seed=9, dtype=dtype), lse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("with_partial", [False, True])
def test_attention_is_that_of_torch(
    dtype: torch.dtype, softcap: float | None, biased: bool, with_extra: bool, with_partial: bool
) -> None:
    query, working, selected = a_step(dtype)
    query = replace(query, softcap=softcap)
    selected = replace(
        selected,
        bias=bias_of(K, 10, dtype) if biased else None,
        extra=extra_rows(dtype) if with_extra else None,
        partial=partial_attention(dtype) if with_partial else None,
    )
    out, lse = NumbaAttend().attend(query, working, selected)
    wanted, wanted_lse = attend(query, working, selected)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_without_a_selection_only_sink_and_ring_are_attended() -> None:
    query, working, _ = a_step(torch.float64)
    for got, wanted in zip(NumbaAttend().attend(query, working, None), attend(query, working, None), strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_only_an_extra_row_or_a_partial_attention_gives() -> None:
    query, working, selected = a_step(torch.float64)
    nothing = working_set(working.rows, torch.zeros_like(working.steady))
    partial = partial_attention(torch.float64)
    empty = replace(selected, valid=torch.zeros_like(selected.valid), partial=partial)
    out, lse = NumbaAttend().attend(query, nothing, empty)
    torch.testing.assert_close(out, partial.out * (partial.lse > -math.inf).unsqueeze(-1))
    torch.testing.assert_close(lse, partial.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_heads_dtype_near_float32(dtype: torch.dtype) -> None:
    query, working, selected = a_step(dtype)
    selected = replace(selected, extra=extra_rows(dtype), partial=partial_attention(dtype))
    out, lse = NumbaAttend().attend(query, working, selected)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    single = replace(
        selected,
        extra=Rows(*(one.float() for one in (selected.extra.keys, selected.extra.values, selected.extra.bias))),
        partial=Partial(selected.partial.out.float(), selected.partial.lse),
    )
    wanted, wanted_lse = attend(
        replace(query, heads=query.heads.float()), working_set(working.rows.float(), working.steady), single
    )
    # Every part is rounded before it is merged, then the sum: two roundings.
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, wanted_lse)


def test_it_is_built_in_under_its_name() -> None:
    row = next(row for row in Registry.load(entry_points=False).listing() if row.name == "numba")
    assert (row.kind, row.stages, row.error) == ("retriever", ("attend", "append"), None)
    assert NumbaAttend.graph_safe
