"""`collide` and `collide_scaled` compiled for a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.collide.naive import BINS, Votes, vote_dtype, vote_scale


def collide(signs: Tensor, table: Tensor, lengths: Tensor, max_weight: int) -> Votes:
    batch, heads, subspaces, num_tokens = signs.shape
    bins = subspaces * max_weight + 1
    votes = torch.zeros(batch, heads, num_tokens, dtype=vote_dtype(bins))
    histogram = torch.zeros(batch, heads, bins, dtype=torch.int32)
    _votes(signs.numpy(), table.numpy(), lengths.numpy(), votes.numpy(), histogram.numpy())
    return Votes(votes, histogram)


@njit(cache=True, nogil=True)
def _votes(signs, table, lengths, votes, histogram):  # type: ignore[no-untyped-def]
    batch, heads, subspaces, num_tokens = signs.shape
    mask = table.shape[3] - 1
    for b in range(batch):
        length = min(lengths[b], num_tokens)
        for h in range(heads):
            out = votes[b, h]
            for s in range(subspaces):
                weights = table[b, h, s]
                row = signs[b, h, s]
                for n in range(length):
                    out[n] += weights[row[n] & mask]
            for n in range(length):
                histogram[b, h, out[n]] += 1


def collide_scaled(signs: Tensor, table: Tensor, lengths: Tensor, norms: Tensor | None, max_weight: int) -> Votes:
    batch, heads, subspaces, num_tokens = signs.shape
    votes = torch.zeros(batch, heads, num_tokens, dtype=torch.uint8)
    histogram = torch.zeros(batch, heads, BINS, dtype=torch.int32)
    no_norms = torch.empty(batch, heads, 0, dtype=torch.uint8)
    _scaled_votes(
        signs.numpy(),
        table.numpy(),
        lengths.numpy(),
        (no_norms if norms is None else norms).numpy(),
        vote_scale(subspaces, max_weight, signs.device).numpy(),
        votes.numpy(),
        histogram.numpy(),
    )
    return Votes(votes, histogram)


@njit(cache=True, nogil=True)
def _scaled_votes(signs, table, lengths, norms, scale, votes, histogram):  # type: ignore[no-untyped-def]
    batch, heads, subspaces, num_tokens = signs.shape
    mask, middle = table.shape[3] - 1, (scale.shape[0] - 1) // 2
    sums = np.empty(num_tokens, np.uint16)
    for b in range(batch):
        length = min(lengths[b], num_tokens)
        for h in range(heads):
            sums[:length] = 0
            for s in range(subspaces):
                weights, row = table[b, h, s], signs[b, h, s]
                for n in range(length):
                    sums[n] += weights[row[n] & mask]
            for n in range(length):
                vote = scale[sums[n]]
                if norms.shape[2] > 0 and sums[n] > middle:
                    vote += norms[b, h, n]
                votes[b, h, n] = vote
                histogram[b, h, vote] += 1
