"""The definition of `attend_rows` against a softmax that is written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from pariskv_kernels.attend import attend_rows
from torch import Tensor

B, H, G, D, STEADY, SLOTS = 2, 3, 4, 16, 7, 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """heads, rows, steady, valid, bias; what is not in use is NaN."""
    steady = random(B, STEADY, seed=1) > -0.5
    valid = random(B, H, SLOTS, seed=2) > -0.5
    rows = random(B, H, STEADY + SLOTS + 1, 2, D, seed=3)
    rows[:, :, :STEADY][~steady.unsqueeze(1).expand(B, H, -1)] = math.nan
    rows[:, :, STEADY:-1][~valid] = rows[:, :, -1] = math.nan
    bias = random(B, H, G, SLOTS, seed=4)
    bias[:, :, 1, 2] = -math.inf
    return random(B, H, G, D), rows, steady, valid, bias


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_one_softmax_over_the_rows_in_use(softcap: float | None, biased: bool) -> None:
    heads, rows, steady, valid, bias = arguments()
    out, lse = attend_rows(heads, rows, steady, valid, bias if biased else None, 0.3, softcap)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    for b, h, g in ((b, h, g) for b in range(B) for h in range(H) for g in range(G)):
        scores, values = [], []
        for m in range(STEADY + SLOTS):
            if not (steady[b, m] if m < STEADY else valid[b, h, m - STEADY]):
                continue
            key, value = rows[b, h, m].double()
            score = float(heads[b, h, g].double() @ key) * 0.3
            score = score if softcap is None else softcap * math.tanh(score / softcap)
            scores.append(score + (float(bias[b, h, g, m - STEADY]) if biased and m >= STEADY else 0.0))
            values.append(value)
        weights = torch.tensor(scores, dtype=torch.float64).exp()
        wanted = (weights.unsqueeze(-1) * torch.stack(values)).sum(0) / weights.sum()
        torch.testing.assert_close(out[b, h, g].double(), wanted, rtol=1e-5, atol=1e-6)
        assert float(lse[b, h, g]) == pytest.approx(math.log(float(weights.sum())), abs=1e-5)


def test_float64_stays_float64() -> None:
    heads, rows, steady, valid, bias = arguments()
    out, lse = attend_rows(heads.double(), rows.double(), steady, valid, bias.double(), 0.3)
    single, single_lse = attend_rows(heads, rows, steady, valid, bias, 0.3)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(out.float(), single)
    torch.testing.assert_close(lse.float(), single_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    heads, rows, steady, valid, _ = arguments()
    heads, rows = heads.to(dtype), rows.to(dtype)
    out, lse = attend_rows(heads, rows, steady, valid, None, 0.3)
    wanted, wanted_lse = attend_rows(heads.float(), rows.float(), steady, valid, None, 0.3)
    assert torch.equal(out, wanted.to(dtype))
    assert torch.equal(lse, wanted_lse)


def test_an_attention_to_other_rows_is_merged_in() -> None:
    heads, rows, steady, valid, _ = arguments()
    other = attend_rows(heads, rows, steady & False, valid, None, 0.3)
    assert bool((other[1] > -math.inf).all())
    got = attend_rows(heads, rows, steady, None, None, 0.3, None, lambda: other)
    for one, wanted in zip(got, attend_rows(heads, rows, steady, valid, None, 0.3), strict=True):
        torch.testing.assert_close(one, wanted)
    nothing = torch.full_like(other[0], math.nan), torch.full_like(other[1], -math.inf)
    same = attend_rows(heads, rows, steady, None, None, 0.3, None, lambda: nothing)
    for one, wanted in zip(same, attend_rows(heads, rows, steady, None, None, 0.3), strict=True):
        torch.testing.assert_close(one, wanted)


def test_without_a_selection_only_the_steady_rows_count() -> None:
    heads, rows, steady, valid, _ = arguments()
    none_valid = attend_rows(heads, rows, steady, torch.zeros_like(valid), None, 0.3)
    for got, wanted in zip(attend_rows(heads, rows, steady, None, None, 0.3), none_valid, strict=True):
        torch.testing.assert_close(got, wanted)


def test_nothing_in_use_gives_zero_and_minus_infinity() -> None:
    heads, rows, steady, valid, bias = arguments()
    rows[:] = math.nan
    out, lse = attend_rows(heads, rows, steady & False, valid & False, bias, 0.3)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_wrong_arguments_are_named() -> None:
    heads, rows, steady, valid, bias = arguments()
    with pytest.raises(TypeError, match=r"^heads"):
        attend_rows(heads.long(), rows, steady, valid, bias, 0.3)
    with pytest.raises(TypeError, match=r"^rows: wanted dtype torch.float32"):
        attend_rows(heads, rows.half(), steady, valid, bias, 0.3)
    with pytest.raises(ValueError, match=r"^rows"):
        attend_rows(heads, rows[..., :8], steady, valid, bias, 0.3)
    with pytest.raises(TypeError, match=r"^steady"):
        attend_rows(heads, rows, steady.int(), valid, bias, 0.3)
    with pytest.raises(ValueError, match=r"^steady"):
        attend_rows(heads, rows, steady[:1], valid, bias, 0.3)
    with pytest.raises(ValueError, match=r"^valid"):
        attend_rows(heads, rows, steady, valid[:, :1], bias, 0.3)
    with pytest.raises(ValueError, match=r"^bias"):
        attend_rows(heads, rows, steady, valid, bias[..., 1:], 0.3)
    with pytest.raises(ValueError, match=r"^bias"):
        attend_rows(heads, rows, steady, None, bias, 0.3)
    found = attend_rows(heads, rows, steady, valid, bias, 0.3)
    with pytest.raises(TypeError, match=r"^other's out: wanted dtype torch\.float32"):
        attend_rows(heads, rows, steady, valid, bias, 0.3, None, lambda: (found[0].half(), found[1]))
    with pytest.raises(ValueError, match=r"^other's log-sum-exp"):
        attend_rows(heads, rows, steady, valid, bias, 0.3, None, lambda: (found[0], found[1][:1]))
    with pytest.raises(ValueError, match=r"^rows: wanted at least 7 steady and 5 selected rows a head, got 11"):
        attend_rows(heads, rows[:, :, :11], steady, valid, bias, 0.3)
