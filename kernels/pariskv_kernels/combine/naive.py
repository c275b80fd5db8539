"""The definition of `combine_scores`."""

from __future__ import annotations

import torch
from torch import Tensor

COMBINE = ("max_logit", "sum_softmax", "max_softmax")


def combine_scores(
    products: Tensor, offset: Tensor, steady: Tensor, how: str, scaling: float, softcap: float | None
) -> Tensor:
    """Probabilities are compared as logarithms: far tokens would all be 0."""
    scores = (products + offset.unsqueeze(3)) * scaling
    if softcap is not None:
        scores = torch.where(products == -torch.inf, -torch.inf, softcap * torch.tanh(scores / softcap))
    if how == "max_logit":
        return scores.amax(2)
    whole = torch.logaddexp(scores.logsumexp(3), steady)
    shares = scores - whole.unsqueeze(3).where(whole.unsqueeze(3) > -torch.inf, 0.0)
    return shares.logsumexp(2) if how == "sum_softmax" else shares.amax(2)
