"""`combine_scores` compiled for a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.combine.naive import COMBINE

MAX_LOGIT, SUM_SOFTMAX, MAX_SOFTMAX = range(len(COMBINE))


def combine_scores(
    products: Tensor, offset: Tensor, steady: Tensor, how: str, scaling: float, softcap: float | None
) -> Tensor:
    combined = torch.empty(*products.shape[:2], products.shape[3], dtype=torch.float32)
    _combine(
        products.numpy(),
        offset.contiguous().numpy(),
        steady.contiguous().numpy(),
        COMBINE.index(how),
        np.float32(scaling),
        np.float32(softcap or 0),
        combined.numpy(),
    )
    return combined


@njit(cache=True, nogil=True, error_model="numpy")
def _score(products, offset, scaling, softcap, scores):  # type: ignore[no-untyped-def]
    """Writes a head's scores [C], and returns the highest."""
    highest = np.float32(-np.inf)
    for c in range(products.shape[0]):
        score = np.float32((products[c] + offset) * scaling)
        if softcap > 0 and score > -np.inf:
            score = np.float32(softcap * np.tanh(score / softcap))
        scores[c] = score
        highest = max(highest, score)
    return highest


@njit(cache=True, nogil=True, error_model="numpy")
def _combine(products, offset, steady, how, scaling, softcap, combined):  # type: ignore[no-untyped-def]
    batch, heads, group, num = products.shape
    scores = np.empty((group, num), np.float32)
    for b in range(batch):
        for h in range(heads):
            for g in range(group):
                highest = max(steady[b, h, g], _score(products[b, h, g], offset[b, h, g], scaling, softcap, scores[g]))
                if how != MAX_LOGIT and highest > -np.inf:
                    total = np.exp(steady[b, h, g] - highest)
                    for c in range(num):
                        total += np.exp(scores[g, c] - highest)
                    whole = highest + np.log(total)
                    for c in range(num):
                        scores[g, c] -= whole
            for c in range(num):
                best = scores[0, c]
                for g in range(1, group):
                    best = max(best, scores[g, c])
                if how == SUM_SOFTMAX and best > -np.inf:
                    total = np.float32(0)
                    for g in range(group):
                        total += np.exp(scores[g, c] - best)
                    best += np.log(total)
                combined[b, h, c] = best


def sum_products(products: Tensor, offset: Tensor, scaling: float, softcap: float | None) -> Tensor:
    sums = torch.empty(*products.shape[:3], 1, 3, dtype=torch.float32)
    numbers = np.float32(scaling), np.float32(softcap or 0)
    _sum(products.numpy(), offset.contiguous().numpy(), *numbers, sums.numpy())
    return sums


@njit(cache=True, nogil=True, error_model="numpy")
def _sum(products, offset, scaling, softcap, sums):  # type: ignore[no-untyped-def]
    batch, heads, group, num = products.shape
    scores = np.empty(num, np.float32)
    for b in range(batch):
        for h in range(heads):
            for g in range(group):
                highest = _score(products[b, h, g], offset[b, h, g], scaling, softcap, scores)
                total, count = np.float32(0), (scores > -np.inf).sum()
                if count:
                    for c in range(num):
                        total += np.exp(scores[c] - highest)
                sums[b, h, g, 0, 0], sums[b, h, g, 0, 1], sums[b, h, g, 0, 2] = highest, total, count
