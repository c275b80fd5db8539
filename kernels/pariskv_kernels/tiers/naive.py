"""The definition of `tier_table`."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pariskv_kernels.tree import tree_sum

PERCENT = (5, 15, 30, 50, 75, 100)
MAX_WEIGHT = len(PERCENT)


Shares = tuple[tuple[int, int], ...]
"""From which length on, how many percent of the keys should collide in a subspace: ascending, the first from 0."""


@lru_cache
def shares_on(shares: Shares, device: torch.device) -> Tensor:
    """Lengths, then percentages: [2, n] int64."""
    return torch.tensor(list(zip(*shares, strict=True)), device=device)


def collision_targets(lengths: Tensor, shares: Shares) -> Tensor:
    """How many keys should collide in a subspace: lengths [B] to [B] int64, rounded up."""
    starts, percents = shares_on(shares, lengths.device).unbind(0)
    place = torch.bucketize(lengths, starts, right=True) - 1
    return (percents[place] * lengths + 99) // 100


@lru_cache
def percent(device: torch.device) -> Tensor:
    return torch.tensor(PERCENT, device=device)


@lru_cache
def nibble_signs(device: torch.device) -> Tensor:
    """[16, 4] float32: -1 where bit j of the pattern is set, else 1."""
    bits = torch.arange(16).unsqueeze(1) >> torch.arange(4) & 1
    return (1 - 2 * bits).float().to(device)


def centroid_scores(rotated: Tensor, subspace_dim: int) -> Tensor:
    """Inner products of the blocks of rotated [B, H, P] with every sign pattern: [B, H, S, 2^m]."""
    quads = rotated.reshape(*rotated.shape[:2], -1, subspace_dim // 4, 1, 4) * nibble_signs(rotated.device)
    scores = tree_sum(quads, dim=-1)  # [B, H, S, m / 4, 16]
    if subspace_dim == 4:
        return scores.squeeze(-2)
    low, high = scores.unbind(-2)
    return (high.unsqueeze(-1) + low.unsqueeze(-2)).flatten(-2)


def tier_table(rotated: Tensor, counts: Tensor, lengths: Tensor, shares: Shares) -> Tensor:
    """Weight of each pattern, from the keys in better patterns than it."""
    targets = collision_targets(lengths, shares)
    subspace_dim = counts.shape[-1].bit_length() - 1
    order = centroid_scores(rotated, subspace_dim).sort(dim=-1, descending=True, stable=True).indices
    population = counts.gather(-1, order)
    before = population.cumsum(-1, dtype=torch.int32) - population
    # before * 100 < percent * target, divided by 100: rounding up keeps it exact for integers.
    bounds = ((targets.unsqueeze(1) * percent(targets.device) + 99) // 100).int()  # [B, 6]
    passed = torch.searchsorted(bounds, before.flatten(1), right=True, out_int32=True)
    weights = (MAX_WEIGHT - passed).to(torch.uint8).view_as(before)
    return torch.empty_like(weights).scatter_(-1, order, weights)
