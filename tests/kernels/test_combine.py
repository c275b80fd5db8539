"""A group's scores as one ranking, against probabilities in float64."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels import cpu
from pariskv_kernels.combine import COMBINE, combine_estimates, combine_scores, sum_estimates
from pariskv_kernels.encode import encode_keys
from pariskv_kernels.rerank import estimate_scores, estimate_scores_by_head
from torch import Tensor


def problem(group: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group + num)
    products = 40 * torch.randn(2, 3, group, num, generator=generator)
    products[:, :, :, ::7] = -torch.inf
    offset, steady = (5 * torch.randn(2, 3, group, generator=generator) for _ in range(2))
    return products, offset, steady


@pytest.mark.parametrize("how", COMBINE)
@pytest.mark.parametrize(("group", "num"), [(1, 1), (3, 65), (16, 300)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_heads_are_combined_by_their_probabilities(how: str, group: int, num: int, softcap: float | None) -> None:
    products, offset, steady = problem(group, num)
    got = combine_scores(products, offset, steady, how, 0.125, softcap)
    scores = (products.double() + offset.double().unsqueeze(3)) * 0.125
    if softcap is not None:
        scores = (softcap * torch.tanh(scores / softcap)).where(products > -torch.inf, -torch.inf)
    if how == "max_logit":
        wanted = scores.amax(2)
    else:
        everything = torch.cat((scores, steady.double().unsqueeze(3)), dim=3)
        shares = everything.log_softmax(-1)[..., :-1]
        wanted = shares.logsumexp(2) if how == "sum_softmax" else shares.amax(2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_far_tokens_still_have_an_order() -> None:
    products = torch.tensor([[[[0.0, -3000.0, -4000.0]]]])
    zero = torch.zeros(1, 1, 1)
    got = combine_scores(products, zero, zero, "sum_softmax", 1.0)
    assert got[0, 0].tolist() == sorted(got[0, 0].tolist(), reverse=True)
    assert bool(got.isfinite().all())


def test_a_head_that_attends_to_what_is_steady_counts_for_less() -> None:
    products = torch.tensor([[[[2.0, 0.0], [0.0, 3.0]]]])
    zero = torch.zeros(1, 1, 2)
    nothing, much = zero - torch.inf, torch.tensor([[[0.0, 20.0]]])
    assert int(combine_scores(products, zero, nothing, "sum_softmax", 1.0).argmax()) == 1
    assert int(combine_scores(products, zero, much, "sum_softmax", 1.0).argmax()) == 0


@pytest.mark.parametrize("how", COMBINE)
def test_of_no_candidates_and_of_empty_ones_nothing_is_made_up(how: str) -> None:
    zero = torch.zeros(1, 1, 2)
    assert combine_scores(torch.zeros(1, 1, 2, 0), zero, zero, how, 1.0).shape == (1, 1, 0)
    for steady in (zero, zero - torch.inf):
        got = combine_scores(torch.full((1, 1, 2, 3), -torch.inf), zero, steady, how, 1.0)
        assert got.flatten().tolist() == [-torch.inf] * 3


@pytest.mark.parametrize(("dim", "m"), [(64, 8), (64, 4), (128, 8), (16, 8)])
def test_estimates_by_head_are_those_of_each_head(dim: int, m: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    codes = encode_keys(torch.randn(2, 3, 90, dim, generator=generator), m)
    rotated = torch.randn(2, 3, 4, dim, generator=generator)
    indices = torch.randint(-1, 90, (2, 3, 70), generator=generator, dtype=torch.int32)
    got = estimate_scores_by_head(rotated, codes.codes, codes.weights, indices)
    for g in range(4):
        one = estimate_scores(rotated[:, :, g].contiguous(), codes.codes, codes.weights, indices)
        torch.testing.assert_close(got[:, :, g], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_estimates_are_summed_by_head_beside_their_ranking(
    softcap: float | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_numba", lambda: compiled)
    generator = torch.Generator().manual_seed(1)
    encoded = encode_keys(torch.randn(2, 3, 90, 64, generator=generator), 8)
    rotated = torch.randn(2, 3, 4, 64, generator=generator)
    offset, steady = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    indices = torch.randint(-1, 90, (2, 3, 70), generator=generator, dtype=torch.int32)
    indices[0, 0] = -1
    codes = encoded.codes, encoded.weights
    scores, sums = combine_estimates(rotated, *codes, indices, offset, steady, "sum_softmax", 0.1, softcap)
    products = estimate_scores_by_head(rotated, *codes, indices)
    torch.testing.assert_close(scores, combine_scores(products, offset, steady, "sum_softmax", 0.1, softcap))
    each = (products.double() + offset.double().unsqueeze(3)) * 0.1
    if softcap is not None:
        each = (softcap * torch.tanh(each / softcap)).where(products > -torch.inf, -torch.inf)
    for found in (sums, sum_estimates(rotated, *codes, indices, offset, 0.1, softcap)):
        assert found.shape[:3] == (2, 3, 4)
        assert found.shape[4:] == (3,)
        highest, mass, count = found.double().unbind(-1)
        assert torch.equal(count.sum(3).long(), (indices >= 0).sum(2, keepdim=True).expand(2, 3, 4))
        torch.testing.assert_close((highest + mass.log()).logsumexp(-1), each.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert bool((sums[0, 0, ..., 0] == -torch.inf).all())
    none = sum_estimates(rotated, *codes, indices[..., :0], offset, 0.1, softcap)
    assert bool((none[..., 0] == -torch.inf).all())
    assert not bool(none[..., 1:].any())


def test_wrong_arguments_are_named() -> None:
    products, offset, steady = problem(2, 5)
    with pytest.raises(ValueError, match=r"how: wanted one of max_logit, sum_softmax, max_softmax, got 'mean'"):
        combine_scores(products, offset, steady, "mean", 1.0)
    with pytest.raises(ValueError, match="steady: wanted shape"):
        combine_scores(products, offset, steady[:1], "max_logit", 1.0)
    with pytest.raises(TypeError, match=r"products: wanted dtype torch\.float32"):
        combine_scores(products.double(), offset, steady, "max_logit", 1.0)
    with pytest.raises(ValueError, match="rotated: wanted shape"):
        estimate_scores_by_head(
            torch.zeros(1, 1, 64),
            torch.zeros(1, 1, 2, 32, dtype=torch.uint8),
            torch.zeros(1, 1, 2, 8, dtype=torch.float16),
            torch.zeros(1, 1, 1, dtype=torch.int32),
        )
