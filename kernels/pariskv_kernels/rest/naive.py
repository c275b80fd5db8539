"""The definition of `estimate_rest`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtri

LEAST = 1e-5
"""Of what all candidates weigh, what the others must weigh at least to count."""

NEWTON_STEPS = 8
"""Steps towards the standard deviation; they converge quadratically, from above."""


class Known(NamedTuple):
    """What is known of a zone without looking at its tokens.

    length  [B]           int32, how many they are
    offset  [B, H, G]     float32, q.(mean key); None: not known, and of tokens that are no candidates nothing is said
    slopes  [B, H, D, D]  float32, the covariance of keys (rows) and values (columns)
    """

    length: Tensor
    offset: Tensor | None
    slopes: Tensor


class Weighed(NamedTuple):
    """What the candidates say before any are chosen, float32.

    whole   [B, H, G]     the logarithm of what all of them weigh, -inf of none
    beyond  [B, H, G]     the same of the tokens that are none, by the scores of a normal distribution; -inf: not known
    shift   [B, H, G, D]  their mean value under a head's weights, beyond the mean of the zone
    """

    whole: Tensor
    beyond: Tensor
    shift: Tensor


class Rest(NamedTuple):
    """A partial attention, to be merged with others by log-sum-exp.

    out  [B, H, G, D] float32, finite
    lse  [B, H, G]    float32, the logarithm of its weight, -inf where there is none
    """

    out: Tensor
    lse: Tensor


def weigh_candidates(heads: Tensor, candidates: Tensor, known: Known, scaling: float) -> Weighed:
    whole = log_mass(candidates)
    beyond = torch.full_like(whole, -torch.inf)
    if known.offset is not None:
        length = known.length.float().view(-1, 1, 1)
        taken = candidates[..., 2].sum(-1) / length.clamp(min=1)  # [B, H, G], the candidates' share
        beyond = log_beyond(whole - length.log(), known.offset * scaling, taken, length)
    queries = heads.float() * scaling
    shift = torch.bmm(queries.flatten(0, 1), known.slopes.flatten(0, 1)).view(heads.shape)
    return Weighed(whole, beyond, shift)


def estimate_rest(weighed: Weighed, chosen: Tensor, mean: Tensor) -> Rest:
    whole = weighed.whole
    share = -torch.expm1(log_mass(chosen) - whole.clamp(min=torch.finfo(whole.dtype).min))
    lost = torch.where((whole > -torch.inf) & (share >= LEAST), whole + share.clamp(min=LEAST).log(), -torch.inf)
    lse = torch.logaddexp(lost, torch.minimum(weighed.beyond, lost))
    share_of_lost = (lost - lse).exp().where(lost > -torch.inf, 0.0)
    return Rest(mean.unsqueeze(2) + share_of_lost.unsqueeze(3) * weighed.shift, lse)


def log_mass(sums: Tensor) -> Tensor:
    """The logarithm of the mass in all parts [B, H, G]; -inf of none."""
    highest, mass, _ = sums.unbind(-1)
    return (highest + mass.log()).logsumexp(-1)


def log_beyond(candidates: Tensor, mean: Tensor, taken: Tensor, length: Tensor) -> Tensor:
    """The logarithm of what the tokens weigh that are no candidates [B, H, G], of normal scores; -inf of none.

    candidates  [B, H, G]  the logarithm of what the candidates weigh, as a mean over all tokens of the zone
    mean        [B, H, G]  of the scores
    taken       [B, H, G]  the candidates' share of the tokens

    Of scores with the mean mu and the standard deviation s, the highest c weigh exp(mu + s^2 / 2) Phi(s - z) and the
    others exp(mu + s^2 / 2) Phi(z - s), z being the quantile of 1 - c. The first is known, and gives s: the logarithm
    is convex in s, so Newton's method comes down to it from where the sum is too large for certain.
    """
    is_there = (candidates > -torch.inf) & (taken > 0) & (taken < 1)
    taken = taken.where((taken > 0) & (taken < 1), 0.5)
    target, z = (candidates - mean).where(is_there, 0.0), -ndtri(taken)
    deviation = (2 * (target - taken.log()).clamp(min=0)).sqrt()
    for _ in range(NEWTON_STEPS):
        at = deviation - z
        slope = (-at.square() / 2 - log_ndtr(at)).exp() / math.sqrt(2 * math.pi)  # of log Phi
        too_large = deviation.square() / 2 + log_ndtr(at) - target
        deviation = (deviation - too_large / (deviation + slope)).clamp(min=0)
    beyond: Tensor = candidates + length.clamp(min=1).log() + log_ndtr(z - deviation) - log_ndtr(deviation - z)
    return beyond.where(is_there, -torch.inf)
