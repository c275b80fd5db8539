"""The definition of `collision_count`."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.tiers import MAX_WEIGHT


def collision_count(signs: Tensor, table: Tensor) -> Tensor:
    """Look every pattern up and add over the subspaces: [B, H, S, N] and [B, H, S, 2^m] to [B, H, N]."""
    patterns = table.shape[-1]
    if patterns < 256:
        # Entries that hold no key hold anything, which must not read outside the table.
        signs = signs & (patterns - 1)
    votes = table.gather(-1, signs.long())
    fits_a_byte = MAX_WEIGHT * signs.shape[2] <= 255
    return votes.sum(2, dtype=torch.uint8 if fits_a_byte else torch.int32).to(torch.int32)
