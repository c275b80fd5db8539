"""Selections against sorted lists."""

from __future__ import annotations

import math

import pytest
import torch
from pariskv_kernels.collide import Votes
from pariskv_kernels.select import compact, select_by_scores, select_by_votes
from torch import Tensor

INF, NAN = math.inf, math.nan


def counted(votes: Tensor, lengths: Tensor, max_vote: int) -> Votes:
    """Votes with the histogram of what is valid, as `collide` gives them."""
    histogram = torch.zeros(*votes.shape[:2], max_vote + 1, dtype=torch.int32)
    for b, h in ((b, h) for b in range(votes.shape[0]) for h in range(votes.shape[1])):
        histogram[b, h] = torch.bincount(votes[b, h, : int(lengths[b])], minlength=max_vote + 1)
    return Votes(votes, histogram)


def padded(values: list[int], width: int) -> list[int]:
    return values + [-1] * (width - len(values))


def best_votes(votes: list[int], count: int, length: int, width: int) -> list[int]:
    order = sorted(range(length), key=lambda position: (-votes[position], position))
    return padded(sorted(order[:count]), width)


def best_scores(scores: list[float], candidates: list[int], count: int, width: int, least: float = -INF) -> list[int]:
    ranked = [-INF if math.isnan(score) else score for score in scores]
    places = [place for place, candidate in enumerate(candidates) if candidate >= 0 and ranked[place] >= least]
    places = sorted(sorted(places, key=lambda place: -ranked[place])[:count])
    return padded([candidates[place] for place in places], width)


@pytest.mark.parametrize("N", [1, 63, 65, 1000])
@pytest.mark.parametrize("max_vote", [0, 1, 48, 384])
def test_the_highest_votes_are_selected_ties_to_the_lower_position(N: int, max_vote: int) -> None:
    generator = torch.Generator().manual_seed(N)
    votes = torch.randint(0, max_vote + 1, (4, 2, N), dtype=torch.int32, generator=generator)
    lengths = torch.tensor([N, N // 2, 0, max(N - 1, 1)], dtype=torch.int32)
    for counts in ([N, N // 4, 0, 1], [1, N, N, N // 2], [0, 0, 0, 0]):
        width = max(counts) + 3
        count = torch.tensor(counts, dtype=torch.int32)
        got = select_by_votes(counted(votes, lengths, max_vote), count, lengths, width)
        assert got.dtype == torch.int32
        for b, h in ((b, h) for b in range(4) for h in range(2)):
            wanted = best_votes(votes[b, h].tolist(), counts[b], int(lengths[b]), width)
            assert got[b, h].tolist() == wanted, (counts, b)


def test_all_ties_select_the_first() -> None:
    votes = torch.full((1, 2, 100), 7, dtype=torch.int32)
    count, lengths = torch.tensor([10], dtype=torch.int32), torch.tensor([90], dtype=torch.int32)
    got = select_by_votes(counted(votes, lengths, 48), count, lengths, 12)
    assert got.tolist() == [[[*range(10), -1, -1]] * 2]


def test_the_votes_of_unused_positions_are_not_read() -> None:
    votes = torch.randint(0, 49, (2, 1, 50), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    count, lengths = torch.tensor([9, 9], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    wanted = select_by_votes(counted(votes, lengths, 48), count, lengths, 10)
    for poison in (-(2**31), -1, 49, 2**31 - 1):
        poisoned = votes.clone()
        poisoned[0, :, 20:], poisoned[1, :, 5:] = poison, poison
        assert torch.equal(select_by_votes(counted(poisoned, lengths, 48), count, lengths, 10), wanted)


def test_a_width_of_nothing_is_legal() -> None:
    votes = torch.zeros(1, 1, 5, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    assert select_by_votes(counted(votes, none + 5, 48), none, none + 5, 0).shape == (1, 1, 0)
    assert select_by_scores(votes.float(), votes, 0).shape == (1, 1, 0)
    assert select_by_scores(votes[..., :0].float(), votes[..., :0], 2).tolist() == [[[-1, -1]]]


def scores_and_candidates(C: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scores with many ties, NaN and infinities; candidates in no order, with empty places."""
    generator = torch.Generator().manual_seed(C + levels)
    scores = torch.randint(0, levels, (3, 2, C), generator=generator).float()
    special = torch.rand(3, 2, C, generator=generator)
    scores[special < 0.1] = NAN
    scores[(special > 0.1) & (special < 0.2)] = -INF
    scores[(special > 0.2) & (special < 0.22)] = INF
    candidates = torch.stack([torch.randperm(2 * C, generator=generator)[:C] for _ in range(6)]).view(3, 2, C).int()
    candidates[torch.rand(3, 2, C, generator=generator) < 0.3] = -1
    candidates[1] = -1
    return scores, candidates


@pytest.mark.parametrize("C", [1, 63, 65, 1000])
@pytest.mark.parametrize("levels", [1, 3, 1_000_000])
@pytest.mark.parametrize("width", [1, 16, 700])
def test_the_best_scores_are_selected_in_the_candidates_order(C: int, levels: int, width: int) -> None:
    scores, candidates = scores_and_candidates(C, levels)
    counts = [width, width // 2, 0]
    got = select_by_scores(scores, candidates, width)
    limited = select_by_scores(scores, candidates, width, torch.tensor(counts, dtype=torch.int32))
    assert got.dtype == limited.dtype == torch.int32
    for b, h in ((b, h) for b in range(3) for h in range(2)):
        row = scores[b, h].tolist(), candidates[b, h].tolist()
        assert got[b, h].tolist() == best_scores(*row, width, width)
        assert limited[b, h].tolist() == best_scores(*row, counts[b], width)


@pytest.mark.parametrize("least", [-INF, 0.5, 2.0, 1e9, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_scores_below_the_least_none_is_selected(least: float, dtype: torch.dtype) -> None:
    scores, candidates = scores_and_candidates(300, 6)
    got = select_by_scores(scores.to(dtype), candidates, 120, least=least)
    limited = select_by_scores(scores.to(dtype), candidates, 120, torch.tensor([20, 3, 0], dtype=torch.int32), least)
    for b, h in ((b, h) for b in range(3) for h in range(2)):
        row = scores[b, h].tolist(), candidates[b, h].tolist()
        assert got[b, h].tolist() == best_scores(*row, 120, 120, least)
        assert limited[b, h].tolist() == best_scores(*row, [20, 3, 0][b], 120, least)


def test_nan_and_minus_infinity_are_selected_last_but_before_nothing() -> None:
    scores = torch.tensor([[[NAN, 1.0, -INF, 2.0, NAN, 5.0]]])
    candidates = torch.tensor([[[10, 11, 12, 13, 14, -1]]], dtype=torch.int32)
    assert select_by_scores(scores, candidates, 2).tolist() == [[[11, 13]]]
    assert select_by_scores(scores, candidates, 4).tolist() == [[[10, 11, 12, 13]]]
    assert select_by_scores(scores, candidates, 6).tolist() == [[[10, 11, 12, 13, 14, -1]]]


def test_selecting_changes_no_input() -> None:
    scores, candidates = scores_and_candidates(65, 3)
    before = scores.clone(), candidates.clone()
    select_by_scores(scores, candidates, 5)
    assert torch.equal(scores.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(candidates, before[1])


@pytest.mark.parametrize("N", [1, 63, 65, 1000])
def test_compact_keeps_the_order_and_drops_the_last(N: int) -> None:
    generator = torch.Generator().manual_seed(N)
    keep = torch.rand(2, 3, N, generator=generator) < 0.5
    values = torch.randint(0, 99, (2, 3, N), generator=generator).int()
    for width in (0, 1, N // 3, N + 2):
        got, valued = compact(keep, width), compact(keep, width, values)
        for b, h in ((b, h) for b in range(2) for h in range(3)):
            positions = keep[b, h].nonzero().flatten()[:width]
            assert got[b, h].tolist() == padded(positions.tolist(), width)
            assert valued[b, h].tolist() == padded(values[b, h, positions].tolist(), width)


def test_wrong_arguments_are_named() -> None:
    scores, count = torch.zeros(1, 1, 5, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    votes = counted(scores, count, 48)
    with pytest.raises(TypeError, match=r"^votes"):
        select_by_votes(Votes(scores.float(), votes.histogram), count, count, 1)
    with pytest.raises(ValueError, match=r"^count"):
        select_by_votes(votes, count.repeat(2), count, 1)
    with pytest.raises(ValueError, match=r"^lengths"):
        select_by_votes(votes, count, count.repeat(2), 1)
    with pytest.raises(ValueError, match=r"^width: wanted 0 or more, got -1"):
        select_by_votes(votes, count, count, -1)
    with pytest.raises(TypeError, match=r"^scores"):
        select_by_scores(scores, scores, 1)
    with pytest.raises(TypeError, match=r"^candidates"):
        select_by_scores(scores.float(), scores.long(), 1)
    with pytest.raises(ValueError, match=r"^candidates"):
        select_by_scores(scores.float(), scores[..., :4], 1)
    with pytest.raises(TypeError, match=r"^keep"):
        compact(scores, 1)
