"""`weigh_candidates` and `estimate_rest` compiled for a CPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.rest.naive import LEAST, NEWTON_STEPS, Known, Rest, Weighed

FARTHEST = 37.0
"""Standard deviations at which the tail of a normal distribution is nothing, and float64 still holds it."""


def weigh_candidates(heads: Tensor, candidates: Tensor, known: Known, scaling: float) -> Weighed:
    whole, beyond = torch.empty(2, *candidates.shape[:3])
    offset = whole if known.offset is None else known.offset.contiguous()
    zone = known.length.numpy(), offset.numpy(), known.offset is not None
    _weigh(candidates.contiguous().numpy(), *zone, scaling, whole.numpy(), beyond.numpy())
    queries = heads.float() * scaling
    shift = torch.bmm(queries.flatten(0, 1), known.slopes.flatten(0, 1)).view(heads.shape)
    return Weighed(whole, beyond, shift)


def estimate_rest(weighed: Weighed, chosen: Tensor, mean: Tensor) -> Rest:
    out, lse = torch.empty_like(weighed.shift), torch.empty_like(weighed.whole)
    given = *weighed, chosen, mean
    _take_off(*(one.contiguous().numpy() for one in given), LEAST, out.numpy(), lse.numpy())
    return Rest(out, lse)


@njit(cache=True, nogil=True, error_model="numpy")
def _log_mass(sums):  # type: ignore[no-untyped-def]
    """The logarithm of the mass in all parts [parts, 3]."""
    top, mass = -np.inf, 0.0
    for part in range(sums.shape[0]):
        top = max(top, sums[part, 0])
    if top == -np.inf:
        return top
    for part in range(sums.shape[0]):
        mass += sums[part, 1] * math.exp(sums[part, 0] - top)
    return top + math.log(mass)


@njit(cache=True, nogil=True, error_model="numpy")
def _below(x):  # type: ignore[no-untyped-def]
    """The share of a normal distribution below x, never 0."""
    return 0.5 * math.erfc(-max(x, -FARTHEST) * math.sqrt(0.5))


@njit(cache=True, nogil=True, error_model="numpy")
def _density(x):  # type: ignore[no-untyped-def]
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@njit(cache=True, nogil=True, error_model="numpy")
def _quantile_above(share):  # type: ignore[no-untyped-def]
    """Where a normal distribution has this share above, 0 < share < 1.

    Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 26.2.23, and three steps of Newton's method.
    """
    small = min(share, 1 - share)
    t = math.sqrt(-2 * math.log(small))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    for _ in range(3):
        z += (_below(-z) - small) / _density(z)
    return z if share <= 0.5 else -z


@njit(cache=True, nogil=True, error_model="numpy")
def _log_beyond(candidates, mean, taken, length):  # type: ignore[no-untyped-def]
    """As in `naive.py`."""
    target, z = candidates - math.log(length) - mean, _quantile_above(taken)
    deviation = math.sqrt(2 * max(target - math.log(taken), 0.0))
    for _ in range(NEWTON_STEPS):
        share = _below(deviation - z)
        too_large = deviation * deviation / 2 + math.log(share) - target
        deviation = max(deviation - too_large / (deviation + _density(deviation - z) / share), 0.0)
    return candidates + math.log(_below(z - deviation)) - math.log(_below(deviation - z))


@njit(cache=True, nogil=True, error_model="numpy")
def _weigh(candidates, lengths, offset, has_offset, scaling, whole, beyond):  # type: ignore[no-untyped-def]
    batch, heads, group = whole.shape
    for b in range(batch):
        length = float(lengths[b])
        for h in range(heads):
            for g in range(group):
                sums = candidates[b, h, g]
                mass, taken = _log_mass(sums), sums[:, 2].sum()
                whole[b, h, g], beyond[b, h, g] = mass, -np.inf
                if has_offset and mass > -np.inf and 0 < taken < length:
                    beyond[b, h, g] = _log_beyond(mass, offset[b, h, g] * scaling, taken / length, length)


@njit(cache=True, nogil=True, error_model="numpy")
def _take_off(whole, beyond, shift, chosen, mean, least, out, lse):  # type: ignore[no-untyped-def]
    batch, heads, group, dim = shift.shape
    for b in range(batch):
        for h in range(heads):
            for g in range(group):
                mass, missing, share = whole[b, h, g], 0.0, 0.0
                lse[b, h, g] = -np.inf
                if mass > -np.inf:
                    missing = -math.expm1(_log_mass(chosen[b, h, g]) - mass)
                if missing >= least:
                    lost = mass + math.log(missing)
                    more = 1 + math.exp(min(beyond[b, h, g] - lost, 0.0))
                    lse[b, h, g], share = lost + math.log(more), 1 / more
                for d in range(dim):
                    out[b, h, g, d] = mean[b, h, d] + share * shift[b, h, g, d]
