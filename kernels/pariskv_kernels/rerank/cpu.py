"""`estimate_scores` and `estimate_scores_by_head` compiled for a CPU."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.quantizer import level_table


@lru_cache
def half_values() -> np.ndarray:
    """Every float16 by its bits, as float32: [65536]."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    scores = torch.empty(indices.shape, dtype=torch.float32)
    levels = level_table(rotated.shape[2] // weights.shape[3], rotated.device)
    bits = weights.view(torch.int16).numpy().view(np.uint16)
    factor = np.float32(1 / math.sqrt(rotated.shape[2]))
    _estimates(
        rotated.numpy(), levels.numpy(), codes.numpy(), bits, half_values(), indices.numpy(), factor, scores.numpy()
    )
    return scores


@njit(cache=True, nogil=True)
def _products(query, levels, table):  # type: ignore[no-untyped-def]
    """What each value of each code byte adds to the estimate, [P / 2, 256]."""
    for j in range(table.shape[0]):
        for high in range(16):
            part = query[2 * j + 1] * levels[high]
            for low in range(16):
                table[j, 16 * high + low] = part + query[2 * j] * levels[low]


@njit(cache=True, nogil=True)
def _estimates(rotated, levels, codes, weights, halves, indices, factor, scores):  # type: ignore[no-untyped-def]
    batch, heads, num_candidates = indices.shape
    subspaces, num_bytes = weights.shape[3], codes.shape[3]
    bytes_each = num_bytes // subspaces
    table = np.empty((num_bytes, 256), np.float32)
    for b in range(batch):
        for h in range(heads):
            _products(rotated[b, h], levels, table)
            for c in range(num_candidates):
                n = indices[b, h, c]
                if n < 0:
                    scores[b, h, c] = -np.inf
                    continue
                row, row_weights = codes[b, h, n], weights[b, h, n]
                total = np.float32(0.0)
                for s in range(subspaces):
                    j = s * bytes_each
                    block = table[j, row[j]] + table[j + 1, row[j + 1]]
                    if bytes_each == 4:
                        # Two short chains of additions: the processor does them side by side.
                        block += table[j + 2, row[j + 2]] + table[j + 3, row[j + 3]]
                    total += block * halves[row_weights[s]]
                scores[b, h, c] = total * factor


def estimate_scores_by_head(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    batch, heads, group, padded = rotated.shape
    scores = torch.empty(batch, heads, group, indices.shape[2], dtype=torch.float32)
    levels = level_table(padded // weights.shape[3], rotated.device) / math.sqrt(padded)
    bits = weights.view(torch.int16).numpy().view(np.uint16)
    queries = rotated.contiguous().numpy()
    _estimates_by_head(queries, levels.numpy(), codes.numpy(), bits, half_values(), indices.numpy(), scores.numpy())
    return scores


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _estimates_by_head(rotated, levels, codes, weights, halves, indices, scores):  # type: ignore[no-untyped-def]
    batch, heads, group, padded = rotated.shape
    num_candidates, subspaces = indices.shape[2], weights.shape[3]
    bytes_each = padded // subspaces // 2
    key = np.empty(padded, np.float32)
    for b in range(batch):
        for h in range(heads):
            for c in range(num_candidates):
                n = indices[b, h, c]
                if n < 0:
                    for g in range(group):
                        scores[b, h, g, c] = -np.inf
                    continue
                # The key that the codes stand for, once for all heads.
                row, row_weights = codes[b, h, n], weights[b, h, n]
                for s in range(subspaces):
                    weight = halves[row_weights[s]]
                    for i in range(s * bytes_each, (s + 1) * bytes_each):
                        key[2 * i] = levels[row[i] & 15] * weight
                        key[2 * i + 1] = levels[row[i] >> 4] * weight
                for g in range(group):
                    query, total = rotated[b, h, g], np.float32(0.0)
                    for j in range(padded):
                        total += query[j] * key[j]
                    scores[b, h, g, c] = total
