"""`linear_table` compiled for a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.linear.naive import MAX_WEIGHT
from pariskv_kernels.tiers.cpu import _quad_scores


def linear_table(rotated: Tensor, subspace_dim: int) -> Tensor:
    batch, heads, padded = rotated.shape
    table = torch.empty(batch, heads, padded // subspace_dim, 1 << subspace_dim, dtype=torch.uint8)
    _linear(rotated.contiguous().numpy(), table.numpy())
    return table


@njit(cache=True, nogil=True, error_model="numpy")
def _linear(rotated, table):  # type: ignore[no-untyped-def]
    batch, heads, subspaces, patterns = table.shape
    quads = rotated.shape[2] // subspaces // 4
    low, high = np.empty(16, np.float32), np.zeros(16, np.float32)
    scores = np.empty((subspaces, patterns), np.float32)
    half = np.float32(MAX_WEIGHT // 2)
    for b in range(batch):
        for h in range(heads):
            most = np.float32(0)
            for s in range(subspaces):
                _quad_scores(rotated[b, h], 4 * quads * s, low)
                if quads == 2:
                    _quad_scores(rotated[b, h], 8 * s + 4, high)
                for pattern in range(patterns):
                    scores[s, pattern] = high[pattern >> 4] + low[pattern & 15]
                    most = max(most, scores[s, pattern])
            factor = half / most if most > 0 else np.float32(0)
            for s in range(subspaces):
                for pattern in range(patterns):
                    weight = np.floor(scores[s, pattern] * factor + (half + np.float32(0.5)))
                    table[b, h, s, pattern] = np.uint8(min(max(weight, 0), MAX_WEIGHT))
