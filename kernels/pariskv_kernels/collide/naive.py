"""The definition of `collide`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Votes(NamedTuple):
    """Votes of a row's keys, and their histogram.

    votes      [B, H, N]     uint8, int32 where 8 bits do not hold S x max_weight; anything past the row's length
    histogram  [B, H, bins]  int32, valid keys with 0, 1, ... votes; bins = S x max_weight + 1
    """

    votes: Tensor
    histogram: Tensor


def vote_dtype(bins: int) -> torch.dtype:
    return torch.uint8 if bins <= 256 else torch.int32


def collide(signs: Tensor, table: Tensor, lengths: Tensor, max_weight: int) -> Votes:
    """Look every pattern up and add over the subspaces: [B, H, S, N] and [B, H, S, 2^m] to [B, H, N]."""
    patterns, bins = table.shape[-1], signs.shape[2] * max_weight + 1
    if patterns < 256:
        # Entries that hold no key hold anything, which must not read outside the table.
        signs = signs & (patterns - 1)
    votes = table.gather(-1, signs.long()).sum(2, dtype=vote_dtype(bins))
    valid = torch.arange(votes.shape[-1], device=votes.device) < lengths.view(-1, 1, 1)
    histogram = torch.zeros(*votes.shape[:2], bins, dtype=torch.int32, device=votes.device)
    # What holds no key may hold any number.
    return Votes(votes, histogram.scatter_add_(-1, votes.long().clamp(max=bins - 1), valid.int().expand(votes.shape)))
