"""The definitions of `combine_scores` and of the sums that go with it."""

from __future__ import annotations

import torch
from torch import Tensor

COMBINE = ("max_logit", "sum_softmax", "max_softmax")


def combine_scores(
    products: Tensor, offset: Tensor, steady: Tensor, how: str, scaling: float, softcap: float | None
) -> Tensor:
    """Probabilities are compared as logarithms: far tokens would all be 0."""
    scores = scores_of(products, offset, scaling, softcap)
    if how == "max_logit":
        return scores.amax(2)
    whole = torch.logaddexp(scores.logsumexp(3), steady)
    shares = scores - whole.unsqueeze(3).where(whole.unsqueeze(3) > -torch.inf, 0.0)
    return shares.logsumexp(2) if how == "sum_softmax" else shares.amax(2)


def scores_of(products: Tensor, offset: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Scores [B, H, G, C] of products, -inf where these are."""
    scores = (products + offset.unsqueeze(3)) * scaling
    if softcap is None:
        return scores
    return torch.where(products == -torch.inf, -torch.inf, softcap * torch.tanh(scores / softcap))


def sum_products(products: Tensor, offset: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """In one part, [B, H, G, 1, 3]: the logarithm of the sum of exp(score) as the highest, 1, and the count."""
    whole = scores_of(products, offset, scaling, softcap).logsumexp(3)
    count = (products > -torch.inf).sum(3)
    return torch.stack((whole, (whole > -torch.inf).float(), count.float()), dim=-1).unsqueeze(3)
