"""ParisKV's coarse selection: the tokens with the most weighted collisions. Section 3.2 of the paper."""

from __future__ import annotations

from pariskv_kernels.collide import collide
from pariskv_kernels.select import select_by_votes
from pariskv_kernels.tiers import Shares, tier_table
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.types import Budget, Codes, Query, Selection

COLLIDING: Shares = ((0, 50), (5_000, 30), (10_000, 25), (30_000, 20))
"""The paper's table: from which length of the zone on, how many percent of its keys should collide in a subspace."""


def vote_for_candidates(query: Query, codes: Codes, budget: Budget) -> Selection:
    """The `budget.count` tokens with the highest votes."""
    table = tier_table(rotated_query(query), codes["counts"], codes.length, COLLIDING)
    votes = collide(codes["signs"], table, codes.length)
    return Selection(select_by_votes(votes, budget.count, codes.length, budget.width))


def rotated_query(query: Query) -> Tensor:
    """What `encode_query` made of the step's queries, [B, H, P]."""
    if query.encoded is None or "rotated" not in query.encoded:
        raise PluginContractError(
            "pariskv: query.encoded has no 'rotated'; pass what encode_query of the codes' producer returned"
        )
    return query.encoded["rotated"]
