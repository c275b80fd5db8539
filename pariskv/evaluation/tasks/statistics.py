"""Estimators of what a benchmark says: means and their errors, pass@k, and whether two retrievers differ."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

import torch

ROUNDS = 10_000
"""Resamples of a bootstrap."""


def mean(values: Sequence[float]) -> float:
    """The mean of one value at least."""
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of independent values, None of fewer than two."""
    count = len(values)
    if count < 2:
        return None
    centre = mean(values)
    return sqrt(sum((value - centre) ** 2 for value in values) / (count - 1) / count)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate that one of k answers is right, of which `right` of `samples` are: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., arXiv 2107.03374, section 2.1.
    """
    if not 0 < k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: wanted 1 <= k <= {samples}")
    return 1 - comb(samples - right, k) / comb(samples, k)


def mcnemar(won: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: items that only one of two answers right, `won` and `lost`.

    The chance that a fair coin is as far from even, or farther.
    """
    count = won + lost
    tail = sum(comb(count, index) for index in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2.0**count)


def paired_bootstrap(differences: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of paired differences, from resampled items."""
    values = torch.tensor(differences, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = []
    for _ in range(0, ROUNDS, 1000):
        drawn = torch.randint(len(values), (1000, len(values)), generator=generator)
        means.append(values[drawn].mean(dim=1))
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
