"""The highest votes, and the best scores, as compact lists of indices; no host synchronisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.collide import Votes
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.select import naive


def select_by_votes(votes: Votes, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Positions of each row's `count` highest votes, equal votes to the lower position.

    votes     of `collide`, over N tokens; anything at and past the row's length
    count     [B]        int32, at most width; where a row holds fewer positions, all of them
    lengths   [B]        int32, valid positions of the row, those that the histogram counts
    returns   [B, H, width] int32, ascending, then -1

    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.2 (bucket select); `naive.py` is the definition.
    """
    check_dtype("votes.votes", votes.votes, torch.uint8, torch.int32)
    check_shape("votes.votes", votes.votes, None, None, None)
    check_shape("votes.histogram", votes.histogram, *votes.votes.shape[:2], None)
    check_shape("count", count, votes.votes.shape[0])
    check_shape("lengths", lengths, votes.votes.shape[0])
    check_width(width)
    if is_compiled_for(votes.votes, count, lengths):
        from pariskv_kernels.select import cpu

        return cpu.select_by_votes(votes, count, lengths, width)
    if is_on_gpu(votes.votes, count, lengths):
        from pariskv_kernels.select import cuda

        return cuda.select_by_votes(votes, count, lengths, width)
    return naive.select_by_votes(votes, count, lengths, width)


def select_by_scores(
    scores: Tensor, candidates: Tensor, width: int, count: Tensor | None = None, least: float = -math.inf
) -> Tensor:
    """The candidates with the best scores, equal scores to the earlier candidate.

    scores      [B, H, C]  floating point; NaN counts as -inf
    candidates  [B, H, C]  int32, -1 where empty (its score is not read)
    count       [B]        int32, how many to take, at most width; None: width
    least       candidates with a score below it are left out
    returns     [B, H, width] int32, in the candidates' order, then -1. Valid candidates with -inf
                are taken only where better ones do not suffice

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("scores", scores)
    check_shape("scores", scores, None, None, None)
    check_dtype("candidates", candidates, torch.int32)
    check_shape("candidates", candidates, *scores.shape)
    check_width(width)
    if count is not None:
        check_shape("count", count, scores.shape[0])
    if scores.dtype in (torch.float32, torch.float64) and is_compiled_for(scores, candidates):
        from pariskv_kernels.select import cpu

        return cpu.select_by_scores(scores, candidates, width, count, least)
    if scores.dtype == torch.float32 and is_on_gpu(scores, candidates):
        from pariskv_kernels.select import cuda_scores

        return cuda_scores.select_by_scores(scores, candidates, width, count, least)
    return naive.select_by_scores(scores, candidates, width, count, least)


def compact(keep: Tensor, width: int, values: Tensor | None = None) -> Tensor:
    """The kept positions (or their values) moved to the front.

    keep     [B, H, N]  bool; what does not fit into width is dropped, the last first
    values   [B, H, N]  int32; None: the positions 0 .. N - 1
    returns  [B, H, width] int32, in order, then -1

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_dtype("keep", keep, torch.bool)
    check_shape("keep", keep, None, None, None)
    check_width(width)
    if values is not None:
        check_dtype("values", values, torch.int32)
        check_shape("values", values, *keep.shape)
    return naive.compact(keep, width, values)


def check_width(width: int) -> None:
    if width < 0:
        raise ValueError(f"width: wanted 0 or more, got {width}")
