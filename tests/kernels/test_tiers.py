"""The tier table against plain Python integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from pariskv_kernels.tiers import tier_table
from pariskv_kernels.tiers.naive import centroid_scores
from torch import Tensor

PERCENT = (5, 15, 30, 50, 75, 100)


def by_hand(scores: list[float], counts: list[int], target: int) -> list[int]:
    """Weights of one subspace's patterns."""
    weights, before = [0] * len(scores), 0
    for pattern in sorted(range(len(scores)), key=lambda pattern: (-scores[pattern], pattern)):
        weights[pattern] = sum(before * 100 < percent * target for percent in PERCENT)
        before += counts[pattern]
    return weights


def problem(m: int, padded: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 1 << m, (2, 3, padded // m, keys), generator=generator)
    counts = torch.zeros(2, 3, padded // m, 1 << m, dtype=torch.int32)
    counts.scatter_add_(-1, patterns, torch.ones_like(patterns, dtype=torch.int32))
    return torch.randn(2, 3, padded, generator=generator), counts


@pytest.mark.parametrize("m", [4, 8])
@pytest.mark.parametrize("keys", [1, 63, 65, 1000])
def test_weights_are_those_of_the_definition(m: int, keys: int) -> None:
    rotated, counts = problem(m, 32, keys)
    rotated[1] = rotated[1].round()  # many equal scores, zeros of both signs
    targets = torch.tensor([max(1, keys // 5), keys])
    scores, table = centroid_scores(rotated, m), tier_table(rotated, counts, targets)
    assert table.dtype == torch.uint8
    for b, h, s in itertools.product(range(2), range(3), range(32 // m)):
        wanted = by_hand(scores[b, h, s].tolist(), counts[b, h, s].tolist(), int(targets[b]))
        assert table[b, h, s].tolist() == wanted


@pytest.mark.parametrize("m", [4, 8])
def test_centroid_scores_are_inner_products_with_the_signs(m: int) -> None:
    rotated, _ = problem(m, 64, 1)
    bits = torch.arange(1 << m).unsqueeze(1) >> torch.arange(m) & 1
    wanted = rotated.view(2, 3, -1, m) @ (1.0 - 2 * bits).T
    torch.testing.assert_close(centroid_scores(rotated, m), wanted, rtol=0, atol=1e-5)  # sums of 8 in float32


@pytest.mark.parametrize("m", [4, 8])
def test_equal_scores_are_ranked_by_the_lower_pattern(m: int) -> None:
    counts = torch.ones(1, 1, 1, 1 << m, dtype=torch.int32)
    table = tier_table(torch.zeros(1, 1, m), counts, torch.tensor([10])).flatten().tolist()
    # before = 0, 1, 2 ...: 5 % of 10 is 0.5, 15 % is 1.5, 30 % is 3, 50 % is 5, 75 % is 7.5
    assert table == [6, 5, 4, 3, 3, 2, 2, 2, 1, 1] + [0] * ((1 << m) - 10)


def test_the_best_pattern_weighs_6_whatever_its_population() -> None:
    rotated = torch.ones(1, 1, 4)  # pattern 0, all positive, is the best; pattern 15 the worst
    counts = torch.zeros(1, 1, 1, 16, dtype=torch.int32)
    counts[..., 0] = 1000
    table = tier_table(rotated, counts, torch.tensor([10])).flatten().tolist()
    assert table[0] == 6
    assert table[1:] == [0] * 15


def test_patterns_without_keys_share_the_tier_of_the_next_one() -> None:
    table = tier_table(torch.ones(1, 1, 4), torch.zeros(1, 1, 1, 16, dtype=torch.int32), torch.tensor([1]))
    assert set(table.flatten().tolist()) == {6}


def test_a_target_of_zero_gives_no_votes() -> None:
    rotated, counts = problem(8, 64, 100)
    assert not tier_table(rotated, counts, torch.tensor([0, 0], dtype=torch.int32)).any()


def test_a_million_keys_do_not_overflow() -> None:
    counts = torch.zeros(1, 1, 1, 16, dtype=torch.int32)
    counts[..., :4] = 40_000_000
    table = tier_table(torch.zeros(1, 1, 4), counts, torch.tensor([100_000_000], dtype=torch.int32))
    # before = 0, 40, 80, 120 million of 100
    assert table.flatten().tolist() == [6, 3, 1] + [0] * 13


def test_rows_do_not_depend_on_the_batch() -> None:
    rotated, counts = problem(8, 128, 500)
    targets = torch.tensor([50, 300])
    whole = tier_table(rotated, counts, targets)
    for row in range(2):
        assert torch.equal(tier_table(rotated[[row]], counts[[row]], targets[[row]]), whole[[row]])


def test_wrong_arguments_are_named() -> None:
    rotated, counts = problem(8, 64, 10)
    targets = torch.tensor([1, 1])
    with pytest.raises(TypeError, match=r"^rotated"):
        tier_table(rotated.double(), counts, targets)
    with pytest.raises(ValueError, match=r"^counts"):
        tier_table(rotated, counts[:, :, :7], targets)
    with pytest.raises(TypeError, match=r"^counts"):
        tier_table(rotated, counts.long(), targets)
    with pytest.raises(ValueError, match=r"^lengths"):
        tier_table(rotated, counts, targets[:1])
    with pytest.raises(TypeError, match=r"^lengths"):
        tier_table(rotated, counts, targets.float())
    with pytest.raises(ValueError, match=r"^subspace_dim"):
        tier_table(rotated, counts[..., :64], targets)
    for shares in ((), ((1, 50),), ((0, 50), (0, 30))):
        with pytest.raises(ValueError, match=r"^shares"):
            tier_table(rotated, counts, targets, shares)


def test_the_share_goes_by_the_length_of_the_row() -> None:
    rotated, counts = problem(8, 64, 1000)
    shares = ((0, 50), (500, 30), (1000, 25))
    for length, share in ((499, 50), (500, 30), (999, 30), (1000, 25), (4000, 25)):
        lengths = torch.full((2,), length)
        targets = (lengths * share + 99) // 100
        assert torch.equal(tier_table(rotated, counts, lengths, shares), tier_table(rotated, counts, targets))
