"""Reducing a Selection to its best tokens, as every rerank ends."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from pariskv_kernels.select import select_by_scores
from torch import Tensor

from pariskv.types import Selection


def keep_best(selection: Selection, scores: Tensor, top_k: int, least: float = -math.inf) -> Selection:
    """The `top_k` candidates with the best scores [B, H, C], none below `least`, with their bias; the rest is -1.

    What else the selection carries, extra rows or a partial attention, stays. One without a slot stays as it is.
    """
    indices, bias = selection.indices, selection.bias
    if not indices.shape[-1]:
        return selection
    if bias is None:
        return replace(selection, indices=select_by_scores(scores, indices, top_k, least=least))
    places = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    chosen = select_by_scores(scores, torch.where(indices >= 0, places, -1), top_k, least=least)
    empty, slots = chosen < 0, chosen.clamp(min=0).long()
    kept = indices.gather(-1, slots).masked_fill(empty, -1)
    bias = bias.gather(-1, slots.unsqueeze(2).expand(-1, -1, bias.shape[2], -1))
    return replace(selection, indices=kept, bias=bias.masked_fill(empty.unsqueeze(2), -torch.inf))
