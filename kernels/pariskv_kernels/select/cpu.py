"""`select_by_votes` and `select_by_scores` compiled for a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.collide.naive import Votes


def select_by_votes(votes: Votes, count: Tensor, lengths: Tensor, width: int) -> Tensor:
    out = torch.full((*votes.votes.shape[:2], width), -1, dtype=torch.int32)
    _by_votes(votes.votes.numpy(), votes.histogram.numpy(), count.numpy(), lengths.numpy(), out.numpy())
    return out


def select_by_scores(scores: Tensor, candidates: Tensor, width: int, count: Tensor | None, least: float) -> Tensor:
    out = torch.full((*scores.shape[:2], width), -1, dtype=torch.int32)
    wanted = torch.full((scores.shape[0],), width, dtype=torch.int32) if count is None else count
    rows = scores.numpy()
    _by_scores(rows, candidates.numpy(), wanted.numpy(), rows.dtype.type(least), out.numpy())
    return out


@njit(cache=True, nogil=True)
def _by_votes(votes, histogram, count, lengths, out):  # type: ignore[no-untyped-def]
    """The histogram gives the lowest vote that is taken; a pass takes everything above, and the first ties."""
    batch, heads, num_tokens = votes.shape
    for b in range(batch):
        length = min(lengths[b], num_tokens)
        wanted = min(count[b], length, out.shape[2])
        for h in range(heads):
            row, chosen, bins = votes[b, h], out[b, h], histogram[b, h]
            threshold, above = bins.shape[0] - 1, np.int64(0)
            while threshold > 0 and above + bins[threshold] < wanted:
                above += bins[threshold]
                threshold -= 1
            ties, place = wanted - above, 0
            for n in range(length):
                vote = row[n]
                if vote > threshold:
                    chosen[place] = n
                    place += 1
                elif vote == threshold and ties > 0:
                    chosen[place] = n
                    place += 1
                    ties -= 1


@njit(cache=True, nogil=True)
def _by_scores(scores, candidates, count, least, out):  # type: ignore[no-untyped-def]
    """A partition gives the lowest score that is taken; a second pass takes everything above, and the first ties."""
    batch, heads, num_candidates = scores.shape
    usable, usable_places = np.empty(num_candidates, scores.dtype), np.empty(num_candidates, candidates.dtype)
    for b in range(batch):
        for h in range(heads):
            row, places, chosen = scores[b, h], candidates[b, h], out[b, h]
            valid = 0
            for c in range(num_candidates):
                score = -np.inf if np.isnan(row[c]) else row[c]
                if places[c] >= 0 and score >= least:
                    usable[valid], usable_places[valid] = score, places[c]
                    valid += 1
            wanted = min(count[b], valid, out.shape[2])
            if wanted == 0:
                continue
            threshold = np.partition(usable[:valid], valid - wanted)[valid - wanted]
            above = 0
            for v in range(valid):
                above += usable[v] > threshold
            ties, place = wanted - above, 0
            for v in range(valid):
                if usable[v] > threshold:
                    chosen[place] = usable_places[v]
                    place += 1
                elif usable[v] == threshold and ties > 0:
                    chosen[place] = usable_places[v]
                    place += 1
                    ties -= 1
