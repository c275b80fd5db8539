"""The vote against a loop over keys and subspaces."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.collide import collision_count


@pytest.mark.parametrize(("m", "subspaces"), [(8, 8), (8, 16), (8, 32), (4, 16), (4, 64)])
@pytest.mark.parametrize("N", [1, 63, 65, 1000])
def test_votes_are_summed_over_the_subspaces(m: int, subspaces: int, N: int) -> None:
    generator = torch.Generator().manual_seed(N)
    signs = torch.randint(0, 1 << m, (2, 3, subspaces, N), dtype=torch.uint8, generator=generator)
    table = torch.randint(0, 7, (2, 3, subspaces, 1 << m), dtype=torch.uint8, generator=generator)
    wanted = torch.zeros(2, 3, N, dtype=torch.int32)
    for b, h, s in ((b, h, s) for b in range(2) for h in range(3) for s in range(subspaces)):
        wanted[b, h] += table[b, h, s].int()[signs[b, h, s].int()]
    got = collision_count(signs, table)
    assert got.dtype == torch.int32
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("subspaces", [1, 16, 42, 43, 64])
def test_the_highest_vote_does_not_overflow(subspaces: int) -> None:
    signs = torch.zeros(1, 1, subspaces, 5, dtype=torch.uint8)
    table = torch.full((1, 1, subspaces, 16), 6, dtype=torch.uint8)
    assert set(collision_count(signs, table).flatten().tolist()) == {6 * subspaces}


def test_anything_in_unused_entries_stays_inside_the_table() -> None:
    signs = torch.full((1, 1, 2, 3), 255, dtype=torch.uint8)
    signs[..., :2] = 1
    table = torch.arange(32, dtype=torch.uint8).view(1, 1, 2, 16)
    assert collision_count(signs, table)[0, 0, :2].tolist() == [18, 18]


def test_wrong_arguments_are_named() -> None:
    signs = torch.zeros(1, 2, 8, 5, dtype=torch.uint8)
    table = torch.zeros(1, 2, 8, 256, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"^signs"):
        collision_count(signs.int(), table)
    with pytest.raises(TypeError, match=r"^table"):
        collision_count(signs, table.int())
    with pytest.raises(ValueError, match=r"^table: wanted shape \[1, 2, 8, \*\], got \[1, 2, 7, 256\]"):
        collision_count(signs, table[:, :, :7])
