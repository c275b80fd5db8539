"""The definitions of `select_by_votes`, `select_by_scores` and `compact`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pariskv_kernels.collide.naive import Votes


def select_by_votes(votes: Votes, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The histogram gives the lowest number of votes that is taken; then compact."""
    tokens, bins = votes.votes.shape[-1], votes.histogram.shape[-1]
    from_here_up = votes.histogram.flip(-1).cumsum(-1).flip(-1)  # [B, H, bins], keys with at least so many votes
    wanted = torch.minimum(count, lengths).clamp(max=width).view(-1, 1, 1)
    threshold = ((from_here_up >= wanted).sum(-1, keepdim=True) - 1).clamp(min=0)
    above = from_here_up.gather(-1, (threshold + 1).clamp(max=bins - 1)).where(threshold + 1 < bins, 0)
    valid = torch.arange(tokens, device=count.device) < lengths.view(-1, 1, 1)
    more, ties = (votes.votes > threshold) & valid, (votes.votes == threshold) & valid
    positions = torch.arange(tokens, dtype=torch.int32, device=count.device).expand(votes.votes.shape)
    return move_to_front(keep_highest(more, ties, wanted - above), width, positions)


def select_by_scores(
    scores: Tensor, candidates: Tensor, width: int, count: Tensor | None, least: float = -math.inf
) -> Tensor:
    """Find the lowest score that is taken by topk, then compact."""
    best = min(width, scores.shape[-1])
    if best == 0:
        return candidates.new_full((*scores.shape[:2], width), -1)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    empty = (candidates < 0) | (scores < least)
    scores.masked_fill_(empty, -torch.inf)
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
