"""Plain Lloyd's iteration for many small problems side by side, on any device."""

from __future__ import annotations

import time

import torch
from torch import Tensor

LEAST_ITERATIONS = 3
"""The paper's: so many run even where the time is up before."""

ON_CPU, ON_GPU = 1 << 18, 1 << 27
"""Distances that are written out at a time: what stays in a CPU's cache, what keeps a GPU busy."""


def kmeans(points: Tensor, num_centroids: int, seed: int, max_iterations: int, max_seconds: float) -> Tensor:
    """Centroids [P, C, d] in float32 of P problems, by Euclidean distance; the same for the same seed.

    points   [P, n, d], at least one
    returns  once no centroid moves, after `max_iterations`, or once `max_seconds` have passed (not before the
             third iteration: the clock is read after each). A centroid that has no points stays where it was

    It starts from points drawn at random. Where there are fewer than C, each is a centroid, several times.
    """
    started = time.monotonic()
    order = torch.randperm(points.shape[1], generator=torch.Generator().manual_seed(seed))
    start = order[torch.arange(num_centroids) % len(order)]
    centroids = points[:, start.to(points.device)].float()
    for iteration in range(max_iterations):
        if iteration >= LEAST_ITERATIONS and time.monotonic() - started >= max_seconds:
            break
        moved = means_of_nearest(points, centroids)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids


def means_of_nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """One iteration: the mean of the points [P, n, d] that each centroid [P, C, d] is the nearest of."""
    problems, num_centroids, _ = centroids.shape
    step = max(1, (ON_GPU if points.is_cuda else ON_CPU) // (problems * num_centroids))
    sums, counts = torch.zeros_like(centroids), centroids.new_zeros(problems, num_centroids, 1)
    squares = centroids.square().sum(-1, keepdim=True)
    for first in range(0, points.shape[1], step):
        some = points[:, first : first + step].float()
        distances = torch.baddbmm(squares, centroids, some.mT, alpha=-2)  # [P, C, n], less the point's own square
        # A product with 0 and 1, not index_add: a GPU adds in the same order every time.
        is_nearest = (distances == distances.amin(1, keepdim=True)).float()
        sums += is_nearest @ some
        counts += is_nearest.sum(-1, keepdim=True)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centroids)


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """The number of the nearest centroid, the first of several: points [..., n, d], centroids [..., C, d] to [..., n].

    In float64, so that how many points there are, and how a product is blocked for them, decides nothing.
    """
    points, centroids = points.double(), centroids.double()
    distances = centroids.square().sum(-1).unsqueeze(-2) - 2 * points @ centroids.mT  # [..., n, C]
    is_nearest = distances == distances.amin(-1, keepdim=True)
    last = centroids.shape[-2] - 1
    return torch.where(is_nearest, torch.arange(last + 1, device=points.device), last).amin(-1)
