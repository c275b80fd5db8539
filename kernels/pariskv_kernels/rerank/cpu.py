"""`estimate_scores` compiled for a CPU."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.rerank.naive import byte_products


@lru_cache
def half_values() -> np.ndarray:
    """Every float16 by its bits, as float32: [65536]."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    scores = torch.empty(indices.shape, dtype=torch.float32)
    products = byte_products(rotated, rotated.shape[2] // weights.shape[3])
    bits = weights.view(torch.int16).numpy().view(np.uint16)
    factor = np.float32(1 / math.sqrt(rotated.shape[2]))
    _estimates(products.numpy(), codes.numpy(), bits, half_values(), indices.numpy(), factor, scores.numpy())
    return scores


@njit(cache=True, nogil=True)
def _estimates(products, codes, weights, halves, indices, factor, scores):  # type: ignore[no-untyped-def]
    batch, heads, num_candidates = indices.shape
    subspaces = weights.shape[3]
    bytes_each = codes.shape[3] // subspaces
    for b in range(batch):
        for h in range(heads):
            table = products[b, h]
            for c in range(num_candidates):
                n = indices[b, h, c]
                if n < 0:
                    scores[b, h, c] = -np.inf
                    continue
                row, row_weights = codes[b, h, n], weights[b, h, n]
                total = np.float32(0.0)
                for s in range(subspaces):
                    block = np.float32(0.0)
                    for j in range(s * bytes_each, (s + 1) * bytes_each):
                        block += table[j, row[j]]
                    total += block * halves[row_weights[s]]
                scores[b, h, c] = total * factor
