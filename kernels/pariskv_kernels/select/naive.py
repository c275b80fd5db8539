"""The definitions of `select_by_votes`, `select_by_scores` and `compact`."""

from __future__ import annotations

import torch
from torch import Tensor


def select_by_votes(votes: Tensor, count: Tensor, lengths: Tensor, width: int, max_vote: int) -> Tensor:
    """Find the lowest vote that is taken from a histogram, then compact."""
    num_tokens = votes.shape[-1]
    positions = torch.arange(num_tokens, dtype=torch.int32, device=votes.device).expand(votes.shape)
    valid = positions < lengths.view(-1, 1, 1)
    level = (votes + 1) * valid.int()  # 0: no token there

    histogram = torch.zeros(*votes.shape[:2], max_vote + 2, dtype=torch.int32, device=votes.device)
    histogram.scatter_add_(-1, level.long(), histogram.new_ones(()).expand(level.shape))
    up_to = histogram.cumsum(-1, dtype=torch.int32)
    passed_over = num_tokens - count.view(-1, 1, 1)
    # The highest level with enough tokens at or above it; 1, the lowest vote, where there are too few.
    threshold = ((up_to - histogram <= passed_over).sum(-1, keepdim=True) - 1).clamp(min=1)
    needed = up_to.gather(-1, threshold) - passed_over
    threshold = threshold.int()
    return move_to_front(keep_highest(level > threshold, level == threshold, needed), width, positions)


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
