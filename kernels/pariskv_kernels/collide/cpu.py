"""`collide` compiled for a CPU."""

from __future__ import annotations

import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.collide.naive import Votes, vote_dtype


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
