"""Votes, selections and estimates on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels.collide import cuda as collide_kernel
from pariskv_kernels.collide import naive as collide_naive
from pariskv_kernels.collide.naive import Votes
from pariskv_kernels.encode import naive as encode_naive
from pariskv_kernels.rerank import cuda as rerank_kernel
from pariskv_kernels.rerank import naive as rerank_naive
from pariskv_kernels.select import cuda as select_kernel
from pariskv_kernels.select import cuda_scores
from pariskv_kernels.select import naive as select_naive
from pariskv_kernels.tiers import cuda as tiers_kernel
from pariskv_kernels.tiers import naive as tiers_naive
from torch import Tensor

INF, NAN = math.inf, math.nan


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_same(got: Any, wanted: Any) -> None:
    assert torch.equal(got.cpu(), wanted)


def check_tiers(batch: int, heads: int, padded: int, m: int, device: torch.device) -> None:
    rotated = torch.randn(batch, heads, padded, generator=generator(padded))
    rotated[:, 0, :m] = 0  # all patterns tie
    counts = torch.randint(0, 40, (batch, heads, padded // m, 1 << m), generator=generator(m)).int()
    lengths, shares = torch.arange(batch) * 700 + 13, ((0, 100), (600, 70), (713, 50))
    got = tiers_kernel.tier_table(rotated.to(device), counts.to(device), lengths.to(device), shares)
    assert_same(got, tiers_naive.tier_table(rotated, counts, lengths, shares))


@pytest.mark.parametrize(("padded", "m"), [(32, 4), (16, 8)])
def test_tiers_are_those_of_the_definition(padded: int, m: int, device: torch.device) -> None:
    check_tiers(1, 1, padded, m, device)


@needs_gpu
@pytest.mark.parametrize("padded", [64, 128, 256])
@pytest.mark.parametrize("m", [4, 8])
def test_tiers_at_real_sizes(padded: int, m: int, device: torch.device) -> None:
    check_tiers(4, 8, padded, m, device)


def check_collide(shape: tuple[int, int, int, int], m: int, lengths: Tensor, device: torch.device, **how: int) -> None:
    signs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(shape[3]))
    for b, length in enumerate(lengths.tolist()):
        signs[b, :, :, :length] &= (1 << m) - 1  # what holds no key holds anything
    table = torch.randint(0, 7, (*shape[:3], 1 << m), dtype=torch.uint8, generator=generator(m))
    wanted = collide_naive.collide(signs, table, lengths, 6)
    got = collide_kernel.collide(signs.to(device), table.to(device), lengths.to(device), 6, **how)
    assert_same(got.histogram, wanted.histogram)
    for b, length in enumerate(lengths.tolist()):
        assert_same(got.votes[b, :, :length], wanted.votes[b, :, :length])


@pytest.mark.parametrize(
    ("subspaces", "m", "tokens"), [(8, 8, 72), (2, 8, 65), (1, 4, 1), (16, 4, 64), (64, 4, 16), (64, 4, 5)]
)
def test_votes_are_those_of_the_definition(subspaces: int, m: int, tokens: int, device: torch.device) -> None:
    check_collide((2, 1, subspaces, tokens), m, ints(tokens, tokens // 2), device, threads=8)


@needs_gpu
@pytest.mark.parametrize(("subspaces", "m"), [(8, 8), (16, 8), (32, 8), (16, 4), (64, 4)])
@pytest.mark.parametrize("tokens", [1, 63, 1000, 131072, 131071])
def test_votes_at_real_sizes(subspaces: int, m: int, tokens: int, device: torch.device) -> None:
    check_collide((2, 4, subspaces, tokens), m, ints(tokens, tokens // 3), device)


def check_by_votes(tokens: int, levels: int, width: int, device: torch.device, heads: int = 2, **how: int) -> None:
    votes = torch.randint(0, levels, (3, heads, tokens), generator=generator(tokens))
    votes = votes.to(torch.uint8 if levels <= 256 else torch.int32)
    lengths, count = ints(tokens, tokens // 2, 0), ints(width, width // 2, width)
    bins = max(levels, 49)
    histogram = torch.stack(
        [torch.bincount(votes[b, h, : lengths[b]].long(), minlength=bins) for b in range(3) for h in range(heads)]
    )
    histogram = histogram.view(3, heads, bins).int()
    wanted = select_naive.select_by_votes(Votes(votes, histogram), count, lengths, width)
    given = Votes(votes.to(device), histogram.to(device))
    assert_same(select_kernel.select_by_votes(given, count.to(device), lengths.to(device), width, **how), wanted)


@pytest.mark.parametrize(
    ("tokens", "levels", "width"), [(1, 2, 1), (63, 7, 20), (136, 49, 50), (136, 1, 9), (31, 300, 31)]
)
def test_the_highest_votes_are_selected(tokens: int, levels: int, width: int, device: torch.device) -> None:
    check_by_votes(tokens, levels, width, device, heads=1, threads=8)


@needs_gpu
@pytest.mark.parametrize("tokens", [65, 1000, 131072, 1_000_001])
@pytest.mark.parametrize("levels", [1, 49, 385])
def test_the_highest_votes_are_selected_at_real_sizes(tokens: int, levels: int, device: torch.device) -> None:
    for width in (1, tokens // 10, tokens):
        check_by_votes(tokens, levels, width, device)


def scores_and_candidates(C: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scores with ties, NaN and infinities; candidates with empty places, one row of nothing else."""
    scores = torch.randint(0, levels, (3, 2, C), generator=generator(C + levels)).float() / 7
    special = torch.rand(3, 2, C, generator=generator(C))
    scores[special < 0.1] = NAN
    scores[(special > 0.1) & (special < 0.2)] = -INF
    scores[(special > 0.2) & (special < 0.22)] = INF
    scores[(special > 0.22) & (special < 0.3)] *= -1
    candidates = torch.arange(C, dtype=torch.int32).repeat(3, 2, 1)
    candidates[torch.rand(3, 2, C, generator=generator(levels)) < 0.2] = -1
    candidates[1, 0] = -1
    return scores, candidates


def check_by_scores(
    scores: Tensor, candidates: Tensor, width: int, device: torch.device, least: float = -INF, **how: int
) -> None:
    for count in (None, ints(width, width // 2, 0)[: len(scores)]):
        wanted = select_naive.select_by_scores(scores, candidates, width, count, least)
        on_device = None if count is None else count.to(device)
        moved = scores.to(device), candidates.to(device)
        got = cuda_scores.select_by_scores(*moved, width, on_device, least, **how)
        assert_same(got, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, as NumPy tells of them
@pytest.mark.parametrize(("C", "levels", "width"), [(1, 3, 1), (65, 1, 5), (65, 1000, 16), (300, 2, 100)])
def test_the_best_scores_are_selected(C: int, levels: int, width: int, device: torch.device) -> None:
    scores, candidates = scores_and_candidates(C, levels)
    check_by_scores(scores[:, :1], candidates[:, :1], width, device, threads=32, levels=64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("C", "width"), [(65, 5), (65, 60), (300, 100), (520, 9)])
@pytest.mark.parametrize("least", [0.5, INF])
def test_of_scores_below_the_least_none_is_selected(C: int, width: int, least: float, device: torch.device) -> None:
    scores, candidates = scores_and_candidates(C, 7)
    check_by_scores(scores[:1, :1], candidates[:1, :1], width, device, least, threads=32, levels=64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # unsigned numbers that wrap around, as NumPy tells of them
def test_the_best_of_several_parts_go_on(device: torch.device) -> None:
    scores, candidates = scores_and_candidates(520, 1000)
    check_by_scores(scores[:1, :1], candidates[:1, :1], 9, device, threads=32, levels=64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("outlier", [1e30, INF])
def test_scores_that_share_a_level_are_told_apart(outlier: float, device: torch.device) -> None:
    """One score so large that all others fall into the lowest level: too many to compare with one another."""
    scores = torch.rand(3, 1, 200, generator=generator(1))
    scores[:, :, 7] = outlier
    candidates = torch.arange(200, dtype=torch.int32).expand_as(scores).contiguous()
    check_by_scores(scores, candidates, 20, device, threads=32, levels=64)


def test_more_than_a_block_can_hold_is_selected_as_well(device: torch.device) -> None:
    check_by_scores(*scores_and_candidates(513, 1000), 257, device, threads=32)


@needs_gpu
@pytest.mark.parametrize("C", [1, 63, 65, 1000, 13107, 104858])
@pytest.mark.parametrize("levels", [1, 3, 1_000_000])
def test_the_best_scores_are_selected_at_real_sizes(C: int, levels: int, device: torch.device) -> None:
    for width in (1, 100, 2048):
        check_by_scores(*scores_and_candidates(C, levels), width, device)
        check_by_scores(*scores_and_candidates(C, levels), width, device, least=0.3)
    scores, candidates = scores_and_candidates(C, levels)
    check_by_scores(torch.randn(scores.shape) * 1e30, candidates, 100, device)
    check_by_scores(torch.randn(scores.shape) * 1e-30, candidates, 100, device)


def test_of_nothing_nothing_is_selected(device: torch.device) -> None:
    none = torch.empty(1, 2, 0, dtype=torch.int32, device=device)
    count, lengths = ints(3).to(device), ints(0).to(device)
    votes = Votes(none.to(torch.uint8), torch.zeros(1, 2, 97, dtype=torch.int32, device=device))
    nothing = torch.full((1, 2, 3), -1, dtype=torch.int32)
    assert_same(select_kernel.select_by_votes(votes, count, lengths, 3, threads=8), nothing)
    assert_same(cuda_scores.select_by_scores(none.float(), none, 3, None), nothing)


def check_estimate(dim: int, m: int, tokens: int, candidates: int, device: torch.device, **how: int) -> None:
    keys = torch.randn(2, 2, tokens, dim, generator=generator(dim))
    codes = encode_naive.encode_keys(keys, m, 42)
    padded = codes.weights.shape[3] * m
    rotated = torch.randn(2, 2, padded, generator=generator(m))
    indices = torch.randint(-1, tokens, (2, 2, candidates), generator=generator(candidates)).int()
    wanted = rerank_naive.estimate_scores(rotated, codes.codes, codes.weights, indices)
    on_device = (tensor.to(device) for tensor in (rotated, codes.codes, codes.weights, indices))
    got = rerank_kernel.estimate_scores(*on_device, **how).cpu()
    assert torch.equal(got == -INF, indices < 0)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dim", "m"), [(64, 8), (80, 8), (64, 4)])
def test_estimates_are_those_of_the_definition(dim: int, m: int, device: torch.device) -> None:
    check_estimate(dim, m, 33, 19, device, threads=16)


@needs_gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("m", [4, 8])
def test_estimates_at_real_sizes(dim: int, m: int, device: torch.device) -> None:
    check_estimate(dim, m, 5000, 1300, device)
