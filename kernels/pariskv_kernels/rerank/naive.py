"""The definitions of `estimate_scores` and `estimate_scores_by_head`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pariskv_kernels.gather.naive import row_numbers
from pariskv_kernels.quantizer import level_table
from pariskv_kernels.tree import tree_sum


def byte_products(rotated: Tensor, subspace_dim: int) -> Tensor:
    """What each value of each code byte adds to the estimate: [B, H, P] to [B, H, P / 2, 256]."""
    products = rotated.unsqueeze(-1) * level_table(subspace_dim, rotated.device)  # [B, H, P, 16]
    low, high = products[:, :, 0::2], products[:, :, 1::2]
    return (high.unsqueeze(-1) + low.unsqueeze(-2)).flatten(-2)


def taken(rows: Tensor, numbers: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """The candidates' rows [B, H, N, X] as [B, H, X, C], so that what follows runs over whole rows of candidates."""
    chosen = rows.flatten(0, 2).index_select(0, numbers).view(*indices.shape, rows.shape[-1])
    return chosen.transpose(2, 3).to(dtype, memory_format=torch.contiguous_format)


def estimate_scores(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Look the candidates' code bytes up, add within each subspace, weigh and add over the subspaces."""
    batch, heads, padded = rotated.shape
    subspaces, bytes_each = weights.shape[-1], padded // weights.shape[-1] // 2
    numbers = row_numbers(indices, codes.shape[2])
    products = byte_products(rotated, 2 * bytes_each).gather(-1, taken(codes, numbers, indices, torch.int64))
    blocks = tree_sum(products.view(batch, heads, subspaces, bytes_each, indices.shape[2]), dim=3)
    blocks = blocks * taken(weights, numbers, indices, torch.float32)  # [B, H, S, C]
    scores = tree_sum(blocks, dim=2) * (1 / math.sqrt(padded))
    return scores.masked_fill_(indices < 0, -torch.inf)


def estimate_scores_by_head(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """One query head after the other."""
    heads = rotated.unbind(2)
    return torch.stack([estimate_scores(head.contiguous(), codes, weights, indices) for head in heads], dim=2)
