"""The scalar quantiser of a unit block's coordinates: 3 bits of magnitude, computed and not trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pariskv_kernels.checks import check_subspace_dim

LEVELS = 8
CELLS = 4096  # of the numerical integration over (0, 1)
ITERATIONS = 1000  # converged to 1e-12 after 610


@dataclass(frozen=True)
class Quantizer:
    """levels [8] ascending; a magnitude is the number of thresholds [7] that are not above it."""

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    mse: float  # expected squared error of a coordinate


@lru_cache
def lloyd_max(subspace_dim: int) -> Quantizer:
    """The 8-level quantiser of least squared error for |u|, a coordinate of a random unit vector of m = 4 or 8.

    u^2 ~ Beta(1/2, (m - 1) / 2), so |u| has the density (1 - u^2)^((m - 3) / 2) up to a factor. Lloyd's
    iteration: thresholds are midpoints of the levels, levels are means between the thresholds.
    Source: ParisKV (arXiv 2602.07721), rerank codes; Lloyd 1982.
    """
    check_subspace_dim(subspace_dim)
    u = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    mass = (1 - u * u) ** ((subspace_dim - 3) / 2)
    mass /= mass.sum()
    total = torch.stack([torch.cat((mass.new_zeros(1), (mass * u**power).cumsum(0))) for power in (0, 1)])
    levels = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    for _ in range(ITERATIONS):
        edges = torch.cat((mass.new_zeros(1), (levels[1:] + levels[:-1]) / 2, mass.new_ones(1))) * CELLS
        cells = edges.long().clamp(max=CELLS - 1)
        weight, moment = torch.lerp(total[:, cells], total[:, cells + 1], edges - cells).diff()
        levels = moment / weight
    thresholds = (levels[1:] + levels[:-1]) / 2
    nearest = levels[torch.bucketize(u, thresholds)]
    return Quantizer(tuple(levels.tolist()), tuple(thresholds.tolist()), float((mass * (u - nearest) ** 2).sum()))


@lru_cache
def level_table(subspace_dim: int, device: torch.device) -> Tensor:
    """The 16 values [16] float32 of a 4-bit code: bits 0-2 the magnitude, bit 3 the sign (set: negative)."""
    levels = torch.tensor(lloyd_max(subspace_dim).levels, dtype=torch.float32)
    return torch.cat((levels, -levels)).to(device)
