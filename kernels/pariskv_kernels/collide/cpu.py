"""`collision_count` compiled for a CPU."""

from __future__ import annotations

import torch
from numba import njit
from torch import Tensor


def collision_count(signs: Tensor, table: Tensor) -> Tensor:
    batch, heads, _, num_tokens = signs.shape
    votes = torch.zeros(batch, heads, num_tokens, dtype=torch.int32)
    _votes(signs.numpy(), table.numpy(), votes.numpy())
    return votes


@njit(cache=True, nogil=True)
def _votes(signs, table, votes):  # type: ignore[no-untyped-def]
    batch, heads, subspaces, num_tokens = signs.shape
    mask = table.shape[3] - 1
    for b in range(batch):
        for h in range(heads):
            for s in range(subspaces):
                weights = table[b, h, s]
                row = signs[b, h, s]
                out = votes[b, h]
                for n in range(num_tokens):
                    out[n] += weights[row[n] & mask]
