"""ShadowKV's selection: a chunk's landmark is its mean key after RoPE. Section 4 of the paper."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Query, Selection, Tensors

SHARE, BUDGET = 24, 1024
"""At most so many outlier chunks in a budget of so many tokens."""


def fields(layer: LayerInfo, chunk: int) -> dict[str, CodeField]:
    """landmarks [B, H, M, D], and cosines [B, H, M]: that of the landmark with the member that it is least like."""
    return {
        "landmarks": CodeField((TOKENS, layer.head_dim), layer.dtype, chunk),
        "cosines": CodeField((TOKENS,), torch.float32, chunk),
    }


def encode_chunks(keys: Tensor, chunk: int) -> Tensors:
    """The fields of a block of keys [R, H, n, D]."""
    rows, heads, tokens, dim = keys.shape
    chunks = keys.float().contiguous().view(rows, heads, tokens // chunk, chunk, dim)
    landmarks = chunks.mean(3)
    cosines = cosine_similarity(chunks, landmarks.unsqueeze(3), dim=-1).amin(3)
    return {"landmarks": landmarks.to(keys.dtype), "cosines": cosines}


def select_chunks(query: Query, codes: Codes, budget: Budget, chunk: int, outliers: int) -> Selection:
    """The outlier chunks, then those whose landmark some query head attends to most; the budget may cut the last.

    outliers  how many at most
    """
    landmarks = codes["landmarks"]
    num_chunks = landmarks.shape[2]
    is_chunk = torch.arange(num_chunks, device=landmarks.device) < codes.length.view(-1, 1, 1) // chunk
    num_outliers = (budget.count * SHARE // BUDGET).clamp(max=outliers)
    is_outlier = lowest(codes["cosines"], is_chunk, num_outliers, min(outliers, budget.width * SHARE // BUDGET))
    scores = chunk_scores(query, landmarks, is_chunk & ~is_outlier)
    scores = scores.masked_fill(is_outlier, torch.inf).where(is_chunk, -torch.inf)
    best = scores.topk(min(num_chunks, -(-budget.width // chunk))).indices  # the best first
    return Selection(tokens_of(best, chunk, torch.minimum(budget.count, codes.length), budget.width))


def lowest(values: Tensor, is_valid: Tensor, count: Tensor, width: int) -> Tensor:
    """Which of the values [B, H, M] are the `count` [B] lowest, of which there are at most `width`: bool [B, H, M]."""
    values = values.where(is_valid, torch.inf)
    order = values.topk(min(width, values.shape[-1]), largest=False).indices
    is_taken = torch.arange(order.shape[-1], device=order.device) < count.view(-1, 1, 1)
    marks = torch.zeros_like(values, dtype=torch.bool)
    return marks.scatter(-1, order, is_taken.expand_as(order)) & is_valid


def chunk_scores(query: Query, landmarks: Tensor, is_candidate: Tensor) -> Tensor:
    """The largest softmax over the candidates of any query head, as a logarithm [B, H, M]."""
    scores = query.heads.float() @ landmarks.float().mT * query.scaling  # [B, H, G, M]
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    return scores.masked_fill(~is_candidate.unsqueeze(2), -torch.inf).log_softmax(-1).amax(2)


def tokens_of(chunks: Tensor, chunk: int, count: Tensor, width: int) -> Tensor:
    """Positions [B, H, width] int32 of the first `count` [B] tokens of the chunks [B, H, X], then -1."""
    inside = torch.arange(chunk, device=chunks.device)
    tokens = (chunks.unsqueeze(-1) * chunk + inside).flatten(2)[..., :width]
    tokens = pad(tokens, (0, width - tokens.shape[-1]), value=-1)
    is_used = torch.arange(width, device=chunks.device) < count.view(-1, 1, 1)
    return tokens.where(is_used, -1).int()
