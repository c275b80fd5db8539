"""The definitions of `collide` and `collide_scaled`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pariskv_kernels.frame.naive import NORM_LEVELS, NORM_STEPS

BINS = 256
BELOW = 16
"""Votes of keys whose inner product is estimated to be 0 or less."""


class Votes(NamedTuple):
    """Votes of a row's keys, and their histogram.

    votes      [B, H, N]     uint8, int32 where 8 bits do not hold S x max_weight; anything past the row's length
    histogram  [B, H, bins]  int32, valid keys with 0, 1, ... votes; bins = S x max_weight + 1, of scaled votes 256
    """

    votes: Tensor
    histogram: Tensor


def vote_dtype(bins: int) -> torch.dtype:
    return torch.uint8 if bins <= 256 else torch.int32


def collide(signs: Tensor, table: Tensor, lengths: Tensor, max_weight: int) -> Votes:
    """Look every pattern up and add over the subspaces: [B, H, S, N] and [B, H, S, 2^m] to [B, H, N]."""
    bins = signs.shape[2] * max_weight + 1
    votes = sum_of_weights(signs, table, vote_dtype(bins))
    return Votes(votes, count_votes(votes, lengths, bins))


def sum_of_weights(signs: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    patterns = table.shape[-1]
    if patterns < 256:
        # Entries that hold no key hold anything, which must not read outside the table.
        signs = signs & (patterns - 1)
    return table.gather(-1, signs.long()).sum(2, dtype=dtype)


def count_votes(votes: Tensor, lengths: Tensor, bins: int) -> Tensor:
    """How many of a row's valid keys have each number of votes: [B, H, N] to int32 [B, H, bins]."""
    valid = torch.arange(votes.shape[-1], device=votes.device) < lengths.view(-1, 1, 1)
    histogram = torch.zeros(*votes.shape[:2], bins, dtype=torch.int32, device=votes.device)
    # What holds no key may hold any number.
    return histogram.scatter_add_(-1, votes.long().clamp(max=bins - 1), valid.int().expand(votes.shape))


@lru_cache
def vote_scale(subspaces: int, max_weight: int, device: torch.device) -> Tensor:
    """The vote of each sum of weights without the norm, uint8 [subspaces * max_weight + 1]."""
    middle = subspaces * max_weight // 2
    below = [v * (BELOW - 1) // middle for v in range(middle + 1)]
    most = BINS - NORM_LEVELS
    above = [min(BELOW + round(NORM_STEPS * math.log2(v)), most) for v in range(1, subspaces * max_weight - middle + 1)]
    return torch.tensor(below + above, dtype=torch.uint8, device=device)


def collide_scaled(signs: Tensor, table: Tensor, lengths: Tensor, norms: Tensor | None, max_weight: int) -> Votes:
    """The logarithm of a product is the sum of the logarithms: no number is multiplied."""
    subspaces = signs.shape[2]
    sums = sum_of_weights(signs, table, torch.int32).clamp(max=subspaces * max_weight)
    votes = vote_scale(subspaces, max_weight, signs.device)[sums.long()]
    if norms is not None:
        levels = norms.clamp(max=NORM_LEVELS - 1)
        votes = votes + levels.where(sums > subspaces * max_weight // 2, 0)
    return Votes(votes, count_votes(votes, lengths, BINS))
