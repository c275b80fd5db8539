"""The definition of `estimate_scores`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pariskv_kernels.gather import take_rows
from pariskv_kernels.quantizer import level_table
from pariskv_kernels.tree import tree_sum


def byte_products(rotated: Tensor, subspace_dim: int) -> Tensor:
    """What each value of each code byte adds to the estimate: [B, H, P] to [B, H, P / 2, 256]."""
    products = rotated.unsqueeze(-1) * level_table(subspace_dim, rotated.device)  # [B, H, P, 16]
    low, high = products[:, :, 0::2], products[:, :, 1::2]
    return (high.unsqueeze(-1) + low.unsqueeze(-2)).flatten(-2)


def candidates_last(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, C, X] to [B, H, X, C], so that what follows runs over whole rows of candidates."""
    return rows.transpose(2, 3).to(dtype, memory_format=torch.contiguous_format)


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Look the candidates' code bytes up, add within each subspace, weigh and add over the subspaces."""
    batch, heads, padded = rotated.shape
    subspaces, bytes_each = weights.shape[-1], padded // weights.shape[-1] // 2
    products = byte_products(rotated, 2 * bytes_each)
    chosen = candidates_last(take_rows(codes, indices), torch.int64)
    added = products.gather(-1, chosen).view(batch, heads, subspaces, bytes_each, indices.shape[2])
    blocks = tree_sum(added, dim=3) * candidates_last(take_rows(weights, indices), torch.float32)  # [B, H, S, C]
    scores = tree_sum(blocks, dim=2) * (1 / math.sqrt(padded))
    return scores.masked_fill_(indices < 0, -torch.inf)
