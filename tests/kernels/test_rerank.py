"""Estimates against the decoded keys, and against the true inner products."""

from __future__ import annotations

import math

import pytest
import torch
from pariskv_kernels.encode import KeyCodes, encode_keys
from pariskv_kernels.quantizer import level_table
from pariskv_kernels.rerank import estimate_scores
from pariskv_kernels.srht import rotate
from torch import Tensor

SHAPES = [(64, 8), (64, 4), (80, 8), (96, 4), (128, 8), (256, 8), (256, 4)]


def problem(dim: int, N: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim + N)
    return torch.randn(2, 3, dim, generator=generator), torch.randn(2, 3, N, dim, generator=generator) * 2


def decoded(codes: KeyCodes, m: int) -> Tensor:
    """Rotated keys [B, H, N, P] float64 as the codes have them, normalised as the keys."""
    nibbles = torch.stack((codes.codes & 15, codes.codes >> 4), dim=-1).flatten(-2)
    levels = level_table(m, nibbles.device)[nibbles.long()].double()
    return levels * codes.weights.double().repeat_interleave(m, dim=-1)


def estimate(query: Tensor, codes: KeyCodes, indices: Tensor) -> Tensor:
    return estimate_scores(rotate(query), codes.codes, codes.weights, indices)


@pytest.mark.parametrize(("dim", "m"), SHAPES)
@pytest.mark.parametrize("N", [1, 63, 65])
def test_an_estimate_is_the_inner_product_with_the_decoded_key(dim: int, m: int, N: int) -> None:
    query, keys = problem(dim, N)
    codes = encode_keys(keys, m)
    rotated = rotate(query).double() / math.sqrt(rotate(query).shape[-1])
    wanted = (decoded(codes, m) * rotated.unsqueeze(2)).sum(-1)
    indices = torch.arange(N - 1, -1, -1).int().expand(2, 3, N).contiguous()
    # float32 against float64: sums of at most 256 terms of size 1
    torch.testing.assert_close(estimate(query, codes, indices).double(), wanted.flip(-1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("dim", "m", "least"), [(64, 8, 0.994), (128, 8, 0.994), (80, 8, 0.994), (128, 4, 0.997)])
def test_estimates_correlate_with_the_inner_products(dim: int, m: int, least: float) -> None:
    query, keys = problem(dim, 2000)
    codes = encode_keys(keys, m)
    indices = torch.arange(2000).int().expand(2, 3, 2000).contiguous()
    true = (keys * query.unsqueeze(2)).sum(-1)
    got = estimate(query, codes, indices)
    correlation = torch.corrcoef(torch.stack((got.flatten(), true.flatten())))[0, 1]
    assert float(correlation) > least  # measured 0.9965 and 0.9976, whatever the seed
    assert float((got * true).sum() / true.square().sum()) == pytest.approx(1, abs=0.01)  # no bias


def test_empty_places_are_minus_infinity_whatever_the_codes_hold() -> None:
    query, keys = problem(64, 10)
    codes = encode_keys(keys, 8)
    codes.weights[:, :, 0] = float("nan")
    indices = torch.tensor([-1, 3, -1, 9], dtype=torch.int32).expand(2, 3, 4).contiguous()
    got = estimate(query, codes, indices)
    assert bool((got[..., [0, 2]] == -torch.inf).all())
    assert bool(got[..., [1, 3]].isfinite().all())


def test_candidates_do_not_depend_on_one_another() -> None:
    query, keys = problem(128, 300)
    codes = encode_keys(keys, 8)
    indices = torch.arange(300).int().expand(2, 3, 300).contiguous()
    whole = estimate(query, codes, indices)
    assert torch.equal(estimate(query, codes, indices[..., 7:20].contiguous()), whole[..., 7:20])
    row = KeyCodes(*(field[1:] for field in codes))
    assert torch.equal(estimate(query[1:], row, indices[1:]), whole[1:])


def test_no_candidates_have_no_scores() -> None:
    query, keys = problem(64, 10)
    assert estimate(query, encode_keys(keys, 8), torch.empty(2, 3, 0, dtype=torch.int32)).shape == (2, 3, 0)


def test_wrong_arguments_are_named() -> None:
    query, keys = problem(64, 10)
    rotated, codes = rotate(query), encode_keys(keys, 8)
    indices = torch.zeros(2, 3, 4, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^rotated"):
        estimate_scores(rotated.double(), codes.codes, codes.weights, indices)
    with pytest.raises(ValueError, match=r"^codes: wanted shape \[2, 3, \*, 32\]"):
        estimate_scores(rotated, codes.codes[..., :31], codes.weights, indices)
    with pytest.raises(TypeError, match=r"^weights"):
        estimate_scores(rotated, codes.codes, codes.weights.float(), indices)
    with pytest.raises(ValueError, match=r"^subspace_dim"):
        estimate_scores(rotated, codes.codes, codes.weights[..., :2], indices)
    with pytest.raises(TypeError, match=r"^indices"):
        estimate_scores(rotated, codes.codes, codes.weights, indices.long())
    with pytest.raises(ValueError, match=r"^indices"):
        estimate_scores(rotated, codes.codes, codes.weights, indices[:, :2])
