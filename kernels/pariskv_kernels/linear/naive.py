"""The definition of `linear_table`."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.tiers.naive import centroid_scores

MAX_WEIGHT = 30
"""Even, so that an inner product of 0 has a weight of its own."""


def linear_table(rotated: Tensor, subspace_dim: int) -> Tensor:
    scores = centroid_scores(rotated, subspace_dim)  # [B, H, S, 2^m]
    most = scores.amax(dim=(2, 3), keepdim=True)
    factor = torch.where(most > 0, (MAX_WEIGHT // 2) / most, 0.0)  # of a query that is 0
    return (scores * factor + (MAX_WEIGHT // 2 + 0.5)).floor().clamp(0, MAX_WEIGHT).to(torch.uint8)
