"""ParisKV's coarse selection: the tokens with the most weighted collisions. Section 3.2 of the paper."""

from __future__ import annotations

from functools import lru_cache

import torch
from pariskv_kernels.collide import collide
from pariskv_kernels.select import select_by_votes
from pariskv_kernels.tiers import tier_table
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.types import Budget, Codes, Query, Selection


def vote_for_candidates(query: Query, codes: Codes, budget: Budget) -> Selection:
    """The `budget.count` tokens with the highest votes."""
    targets = collision_targets(codes.length)
    table = tier_table(rotated_query(query), codes["counts"], targets)
    votes = collide(codes["signs"], table, codes.length)
    return Selection(select_by_votes(votes, budget.count, codes.length, budget.width))


@lru_cache
def collision_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths from which the next percentage applies [3], and the percentages [4]."""
    return (
        torch.tensor((5_000, 10_000, 30_000), dtype=torch.int32, device=device),
        torch.tensor((50, 30, 25, 20), device=device),
    )


def collision_targets(lengths: Tensor) -> Tensor:
    """How many keys should collide in a subspace: lengths [B] int32 to [B] int64, rounded up.

    50 % of the zone below 5,000 tokens, 30 % below 10,000, 25 % below 30,000, else 20 % (the paper's table).
    """
    starts, percent = collision_table(lengths.device)
    return (percent[torch.bucketize(lengths, starts, right=True)] * lengths + 99) // 100


def rotated_query(query: Query) -> Tensor:
    """What `encode_query` made of the step's queries, [B, H, P]."""
    if query.encoded is None or "rotated" not in query.encoded:
        raise PluginContractError(
            "pariskv: query.encoded has no 'rotated'; pass what encode_query of the codes' producer returned"
        )
    return query.encoded["rotated"]
