"""The vote against a loop over keys and subspaces."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.collide import collide
from torch import Tensor


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("m", "subspaces"), [(8, 8), (8, 16), (8, 32), (4, 16), (4, 64)])
@pytest.mark.parametrize("N", [1, 63, 65, 1000])
def test_votes_are_summed_over_the_subspaces_and_counted(m: int, subspaces: int, N: int) -> None:
    generator = torch.Generator().manual_seed(N)
    signs = torch.randint(0, 1 << m, (2, 3, subspaces, N), dtype=torch.uint8, generator=generator)
    table = torch.randint(0, 7, (2, 3, subspaces, 1 << m), dtype=torch.uint8, generator=generator)
    wanted = torch.zeros(2, 3, N, dtype=torch.int32)
    for b, h, s in ((b, h, s) for b in range(2) for h in range(3) for s in range(subspaces)):
        wanted[b, h] += table[b, h, s].int()[signs[b, h, s].int()]
    valid = N, N // 2
    got = collide(signs, table, lengths(*valid))
    assert got.votes.dtype == (torch.uint8 if subspaces * 6 < 256 else torch.int32)
    assert got.histogram.dtype == torch.int32
    for b, h in ((b, h) for b in range(2) for h in range(3)):
        row = wanted[b, h, : valid[b]]
        assert torch.equal(got.votes[b, h, : valid[b]].int(), row)
        assert torch.equal(got.histogram[b, h].long(), torch.bincount(row, minlength=6 * subspaces + 1))


@pytest.mark.parametrize("subspaces", [1, 16, 42, 43, 64])
def test_the_highest_vote_does_not_overflow(subspaces: int) -> None:
    signs = torch.zeros(1, 1, subspaces, 5, dtype=torch.uint8)
    table = torch.full((1, 1, subspaces, 16), 6, dtype=torch.uint8)
    got = collide(signs, table, lengths(5))
    assert set(got.votes.flatten().tolist()) == {6 * subspaces}
    assert got.histogram[0, 0, -1] == 5


def test_another_highest_weight_has_its_own_histogram() -> None:
    signs = torch.zeros(1, 1, 16, 5, dtype=torch.uint8)
    table = torch.full((1, 1, 16, 256), 15, dtype=torch.uint8)
    got = collide(signs, table, lengths(5), max_weight=15)
    assert got.histogram.shape == (1, 1, 241)
    assert got.votes.flatten().tolist() == [240] * 5


def test_anything_in_unused_entries_stays_inside_the_table() -> None:
    signs = torch.full((1, 1, 2, 3), 255, dtype=torch.uint8)
    signs[..., :2] = 1
    table = torch.arange(32, dtype=torch.uint8).view(1, 1, 2, 16)
    got = collide(signs, table, lengths(2), max_weight=31)
    assert got.votes[0, 0, :2].tolist() == [18, 18]
    assert int(got.histogram.sum()) == 2


def test_wrong_arguments_are_named() -> None:
    signs = torch.zeros(1, 2, 8, 5, dtype=torch.uint8)
    table = torch.zeros(1, 2, 8, 256, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"^signs"):
        collide(signs.int(), table, lengths(5))
    with pytest.raises(TypeError, match=r"^table"):
        collide(signs, table.int(), lengths(5))
    with pytest.raises(ValueError, match=r"^table: wanted shape \[1, 2, 8, \*\], got \[1, 2, 7, 256\]"):
        collide(signs, table[:, :, :7], lengths(5))
    with pytest.raises(ValueError, match=r"^lengths"):
        collide(signs, table, lengths(5, 5))
