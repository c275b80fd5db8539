"""`tier_table` compiled for a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.tiers.naive import MAX_WEIGHT, PERCENT, Shares, collision_targets

BUCKETS = 1024
PERCENTS = np.array(PERCENT, dtype=np.int64)


def tier_table(rotated: Tensor, counts: Tensor, lengths: Tensor, shares: Shares) -> Tensor:
    targets = collision_targets(lengths, shares)
    table = torch.empty(counts.shape, dtype=torch.uint8)
    _tiers(rotated.numpy(), counts.numpy(), targets.numpy(), PERCENTS, table.numpy())
    return table


@njit(cache=True, nogil=True)
def _quad_scores(block, start, scores):  # type: ignore[no-untyped-def]
    """Inner products of 4 coordinates with the 16 patterns, added in the order of `tree_sum`."""
    for pattern in range(16):
        x0 = -block[start] if pattern & 1 else block[start]
        x1 = -block[start + 1] if pattern & 2 else block[start + 1]
        x2 = -block[start + 2] if pattern & 4 else block[start + 2]
        x3 = -block[start + 3] if pattern & 8 else block[start + 3]
        scores[pattern] = (x0 + x2) + (x1 + x3)


@njit(cache=True, nogil=True)
def _order(scores, order, starts):  # type: ignore[no-untyped-def]
    """Patterns by falling score, equal ones by rising number: buckets first, then insertion within reach."""
    size = scores.shape[0]
    reach = np.float32(0.0)
    for pattern in range(size):
        reach = max(reach, abs(scores[pattern]))
    factor = np.float32((BUCKETS - 1) / 2.0) / reach if reach > 0 else np.float32(0.0)
    starts[:] = 0
    for pattern in range(size):
        starts[np.int64((reach - scores[pattern]) * factor) + 1] += 1
    for bucket in range(BUCKETS):
        starts[bucket + 1] += starts[bucket]
    for pattern in range(size):
        falls_in = np.int64((reach - scores[pattern]) * factor)
        order[starts[falls_in]] = pattern
        starts[falls_in] += 1
    for place in range(1, size):
        pattern, score = order[place], scores[order[place]]
        before = place - 1
        while before >= 0 and (
            scores[order[before]] < score or (scores[order[before]] == score and order[before] > pattern)
        ):
            order[before + 1] = order[before]
            before -= 1
        order[before + 1] = pattern


@njit(cache=True, nogil=True)
def _tiers(rotated, counts, targets, percents, table):  # type: ignore[no-untyped-def]
    batch, heads, subspaces, patterns = counts.shape
    scores = np.empty(patterns, np.float32)
    low, high = np.empty(16, np.float32), np.empty(16, np.float32)
    order = np.empty(patterns, np.int64)
    starts = np.empty(BUCKETS + 1, np.int64)
    subspace_dim = rotated.shape[2] // subspaces
    for b in range(batch):
        for h in range(heads):
            for s in range(subspaces):
                _quad_scores(rotated[b, h], s * subspace_dim, low)
                if subspace_dim == 4:
                    scores[:] = low
                else:
                    _quad_scores(rotated[b, h], s * subspace_dim + 4, high)
                    for pattern in range(256):
                        scores[pattern] = high[pattern >> 4] + low[pattern & 15]
                _order(scores, order, starts)
                before, tier = 0, 0
                for place in range(patterns):
                    pattern = order[place]
                    while tier < MAX_WEIGHT and before * 100 >= percents[tier] * targets[b]:
                        tier += 1
                    table[b, h, s, pattern] = MAX_WEIGHT - tier
                    before += counts[b, h, s, pattern]
