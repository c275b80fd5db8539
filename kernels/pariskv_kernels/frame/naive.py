"""The definitions of `to_frame` and `queries_to_frame`."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pariskv_kernels.tree import tree_sum

NORM_STEPS = 16
"""Levels of a norm to a factor of two."""
NORM_LEVELS = 64
"""A norm of the root mean square has the level in the middle, half of them."""


class Framed(NamedTuple):
    """Keys in their frame.

    z      [B, H, n, P] float32
    norms  [B, H, n]    uint8, the nearest to NORM_LEVELS / 2 + NORM_STEPS x log2(|z| / sqrt(power)), 0 to
                        NORM_LEVELS - 1
    """

    z: Tensor
    norms: Tensor


class FramedQueries(NamedTuple):
    """A step's queries in the keys' frame.

    heads    [B, H, G, P] float32, each query head
    rotated  [B, H, P]    float32, their mean, by the heads' weights
    offset   [B, H, G]    float32, q.centre
    """

    heads: Tensor
    rotated: Tensor
    offset: Tensor


@lru_cache
def norm_thresholds(device: torch.device) -> Tensor:
    """[NORM_LEVELS - 1] float32, ascending: a level is the number of thresholds that |z|^2 / power reaches."""
    halfway = torch.arange(1, NORM_LEVELS, dtype=torch.float64) - 0.5 - NORM_LEVELS / 2
    return torch.exp2(2 * halfway / NORM_STEPS).float().to(device)


def to_frame(keys: Tensor, centre: Tensor, matrix: Tensor, power: Tensor) -> Framed:
    """One coordinate of the keys after the other: a matrix product may add in an order that depends on the shape."""
    x = keys.float() - centre.unsqueeze(2)
    z = torch.zeros(*keys.shape[:3], matrix.shape[3], device=keys.device)
    for column, row in zip(x.unbind(3), matrix.unbind(2), strict=True):
        z = z + column.unsqueeze(3) * row.unsqueeze(2)
    return Framed(z, norm_levels(z, power))


def norm_levels(z: Tensor, power: Tensor) -> Tensor:
    squares = tree_sum(z * z, dim=3)  # [B, H, n]
    return torch.bucketize(squares * inverse(power).unsqueeze(2), norm_thresholds(z.device), right=True).to(torch.uint8)


def inverse(power: Tensor) -> Tensor:
    """1 / power, 0 of keys that are all the same."""
    return torch.where(power > 0, 1 / power, 0.0)


def queries_to_frame(heads: Tensor, centre: Tensor, matrix: Tensor, weights: Tensor) -> FramedQueries:
    queries = heads.float()
    turned = torch.bmm(queries.flatten(0, 1), matrix.flatten(0, 1)).view(*heads.shape[:3], -1)
    rotated = (turned * weights.unsqueeze(3)).sum(2) / heads.shape[2]
    return FramedQueries(turned, rotated, (queries * centre.unsqueeze(2)).sum(3))
