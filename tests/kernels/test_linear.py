"""Linear votes: the table against brute force, and votes on their logarithmic scale."""

from __future__ import annotations

import math

import pytest
import torch
from pariskv_kernels.collide import collide_scaled
from pariskv_kernels.frame import NORM_LEVELS
from pariskv_kernels.linear import MAX_WEIGHT, linear_table
from torch import Tensor


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("padded", "m"), [(64, 8), (64, 4), (128, 8), (256, 8), (16, 8)])
def test_a_weight_is_the_patterns_inner_product_with_one_scale_for_the_head(padded: int, m: int) -> None:
    rotated = torch.randn(2, 3, padded, generator=torch.Generator().manual_seed(padded))
    got = linear_table(rotated, m)
    patterns = torch.arange(1 << m)
    signs = 1.0 - 2.0 * ((patterns.unsqueeze(1) >> torch.arange(m)) & 1).double()  # [2^m, m]
    scores = rotated.double().view(2, 3, -1, m) @ signs.T
    exact = scores / scores.amax((2, 3), keepdim=True) * MAX_WEIGHT / 2 + MAX_WEIGHT / 2
    assert got.dtype == torch.uint8
    assert float((got - exact).abs().max()) <= 0.5 + 1e-4
    assert got.amax((2, 3)).tolist() == [[MAX_WEIGHT] * 3] * 2
    assert got.amin((2, 3)).tolist() == [[0] * 3] * 2


def test_a_query_of_zeros_prefers_nothing() -> None:
    assert set(linear_table(torch.zeros(1, 1, 64), 8).flatten().tolist()) == {MAX_WEIGHT // 2}


@pytest.mark.parametrize(("m", "subspaces"), [(8, 2), (8, 8), (8, 16), (8, 32), (4, 16), (4, 64)])
@pytest.mark.parametrize("n", [1, 63, 1000])
@pytest.mark.parametrize("with_norms", [True, False])
def test_votes_are_on_a_logarithmic_scale_and_counted(m: int, subspaces: int, n: int, with_norms: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    signs = torch.randint(0, 1 << m, (2, 3, subspaces, n), dtype=torch.uint8, generator=generator)
    table = torch.randint(0, MAX_WEIGHT + 1, (2, 3, subspaces, 1 << m), dtype=torch.uint8, generator=generator)
    norms = torch.randint(0, NORM_LEVELS, (2, 3, n), dtype=torch.uint8, generator=generator) if with_norms else None
    valid = n, n // 2
    got = collide_scaled(signs, table, lengths(*valid), norms)
    assert got.votes.dtype == torch.uint8
    assert got.histogram.shape == (2, 3, 256)
    middle = subspaces * MAX_WEIGHT // 2
    for b, h in ((b, h) for b in range(2) for h in range(3)):
        wanted = []
        for i in range(valid[b]):
            v = sum(int(table[b, h, s, int(signs[b, h, s, i])]) for s in range(subspaces))
            level = 0 if norms is None else int(norms[b, h, i])
            wanted.append(16 + round(16 * math.log2(v - middle)) + level if v > middle else v * 15 // middle)
        assert got.votes[b, h, : valid[b]].tolist() == wanted
        assert got.histogram[b, h].tolist() == torch.bincount(torch.tensor(wanted).long(), minlength=256).tolist()


@pytest.mark.parametrize("subspaces", [1, 8, 64, 128])
def test_the_highest_vote_fits_a_byte_and_unused_entries_do_no_harm(subspaces: int) -> None:
    signs = torch.full((1, 1, subspaces, 5), 255, dtype=torch.uint8)
    table = torch.full((1, 1, subspaces, 16), MAX_WEIGHT, dtype=torch.uint8)
    norms = torch.full((1, 1, 5), 255, dtype=torch.uint8)
    signs[..., :3], norms[..., :3] = 0, NORM_LEVELS - 1
    got = collide_scaled(signs, table, lengths(3), norms)
    most = min(16 + round(16 * math.log2(subspaces * MAX_WEIGHT / 2)), 256 - NORM_LEVELS) + NORM_LEVELS - 1
    assert most < 256
    assert got.votes[0, 0, :3].tolist() == [most] * 3
    assert int(got.histogram[0, 0, most]) == 3
    assert int(got.histogram.sum()) == 3


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"rotated: wanted dtype torch\.float32"):
        linear_table(torch.zeros(1, 1, 64, dtype=torch.float64), 8)
    with pytest.raises(ValueError, match="rotated: wanted a multiple of 8 coordinates, got 60"):
        linear_table(torch.zeros(1, 1, 60), 8)
    with pytest.raises(ValueError, match="subspace_dim: wanted 4 or 8"):
        linear_table(torch.zeros(1, 1, 64), 16)
    signs, table = torch.zeros(1, 1, 8, 5, dtype=torch.uint8), torch.zeros(1, 1, 8, 256, dtype=torch.uint8)
    with pytest.raises(ValueError, match="norms: wanted shape"):
        collide_scaled(signs, table, lengths(5), torch.zeros(1, 1, 4, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"norms: wanted dtype torch\.uint8"):
        collide_scaled(signs, table, lengths(5), torch.zeros(1, 1, 5))
