"""The definitions of `select_by_votes`, `select_by_scores` and `compact`."""

from __future__ import annotations

import torch
from torch import Tensor

INT32_END = 2**31


def select_by_votes(votes: Tensor, count: Tensor, lengths: Tensor, width: int, max_vote: int) -> Tensor:
    """Order tokens by vote, then position, in one integer; find the lowest that is taken; compact."""
    num_tokens = votes.shape[-1]
    dtype = torch.int32 if (max_vote + 1) * num_tokens < INT32_END else torch.int64
    positions = torch.arange(num_tokens, dtype=torch.int32, device=votes.device)
    rank = votes.to(dtype) * num_tokens + (num_tokens - 1 - positions)
    rank = torch.where(positions < lengths.view(-1, 1, 1), rank, -1)
    threshold = lowest_taken(rank, count, width).clamp(min=0)
    return move_to_front(rank >= threshold, width, positions.expand(votes.shape))


def lowest_taken(rank: Tensor, count: Tensor, width: int) -> Tensor:
    """The count[b]-th highest of rank [B, H, N], [B, H, 1]; below 0 where there are fewer.

    topk takes the same number in every row, so a row that wants fewer gets stand-ins above all others.
    """
    if width == 0:
        return rank.new_full((*rank.shape[:2], 1), torch.iinfo(rank.dtype).max)
    missing = width - count.view(-1, 1, 1)
    slots = torch.arange(width, dtype=torch.int32, device=rank.device)
    stand_ins = torch.where(slots < missing, torch.iinfo(rank.dtype).max, -1).to(rank.dtype)
    extended = torch.cat((rank, stand_ins.expand(*rank.shape[:2], width)), dim=-1)
    return extended.topk(width, sorted=False).values.amin(-1, keepdim=True)


def select_by_scores(scores: Tensor, candidates: Tensor, width: int, count: Tensor | None) -> Tensor:
    """Find the lowest score that is taken by topk, then compact."""
    best = min(width, scores.shape[-1])
    if best == 0:
        return candidates.new_full((*scores.shape[:2], width), -1)
    empty = candidates < 0
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill_(empty, -torch.inf)
    top = scores.topk(best, sorted=count is not None).values
    if count is None:
        taken: Tensor | int = best
        threshold = top.amin(-1, keepdim=True)
    else:
        taken = count.view(-1, 1, 1)
        threshold = top.gather(-1, (taken.long() - 1).clamp(0, best - 1).expand(-1, top.shape[1], -1))
    above, ties = scores > threshold, (scores == threshold).masked_fill_(empty, False)
    needed = taken - above.sum(-1, keepdim=True, dtype=torch.int32)
    return move_to_front(keep_highest(above, ties, needed), width, candidates)


def keep_highest(above: Tensor, ties: Tensor, needed: Tensor) -> Tensor:
    """Everything above the threshold, and the first `needed` [B, H, 1] of the ties."""
    return above | (ties & (ties.int().cumsum(-1, dtype=torch.int32) <= needed))


def compact(keep: Tensor, width: int, values: Tensor | None) -> Tensor:
    """The first `width` that are kept, in order, then -1."""
    if values is None:
        values = torch.arange(keep.shape[-1], dtype=torch.int32, device=keep.device).expand(keep.shape)
    return move_to_front(keep & (keep.cumsum(-1, dtype=torch.int32) <= width), width, values)


def move_to_front(keep: Tensor, width: int, values: Tensor) -> Tensor:
    """The values [B, H, N] of the at most `width` that are kept, then -1: [B, H, width]."""
    out = values.new_full((*keep.shape[:2], width + 1), -1)
    kept = keep.long()
    # Slot 0 takes everything that is not kept.
    return out.scatter_(-1, kept.cumsum(-1) * kept, values)[..., 1:].contiguous()
