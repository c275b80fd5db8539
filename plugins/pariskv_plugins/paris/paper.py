"""ParisKV as published: training-free, so there is nothing to fit, and nothing goes stale. Sections 3.1 to 3.3."""

from __future__ import annotations

from dataclasses import dataclass

from pariskv_kernels.collide import collide
from pariskv_kernels.encode import encode_keys
from pariskv_kernels.rerank import estimate_scores
from pariskv_kernels.select import select_by_votes
from pariskv_kernels.srht import rotate_group_mean
from pariskv_kernels.tiers import Shares, tier_table
from torch import Tensor

from pariskv.hookspecs import Retriever, hookimpl
from pariskv.types import Budget, Codes, LayerInfo, Query, Selection, Tensors
from pariskv_plugins.keep import keep_best
from pariskv_plugins.paris.format import check_options, encoded, fields

COLLIDING: Shares = ((0, 50), (5_000, 30), (10_000, 25), (30_000, 20))
"""The paper's table: from which length of the zone on, how many percent of its keys should collide in a subspace."""


@dataclass(frozen=True)
class PaperOptions:
    subspace_dim: int = 8  # coordinates per subspace, m: 4 or 8
    seed: int = 42  # of the rotation's random signs


class ParisPaper(Retriever):
    """Rotated keys; the patterns' ranks vote; the mean of the group's queries decides."""

    graph_safe = True
    combine = "mean_query"

    def __init__(self, options: PaperOptions | None = None) -> None:
        self.options = options or PaperOptions()
        check_options("pariskv-paper", self.options.subspace_dim, self.options.seed)
        self.format = f"pariskv-m{self.options.subspace_dim}"

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity, **fields("pariskv-paper", layer.head_dim, self.options.subspace_dim))

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return encode_keys(keys, self.options.subspace_dim, self.options.seed)._asdict()

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        """rotated [B, H, P] float32: the group's mean, not normalised, for a factor changes no ranking."""
        return {"rotated": rotate_group_mean(heads, self.options.seed)}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        """The `budget.count` tokens with the highest votes."""
        table = tier_table(encoded(query, "rotated"), codes["counts"], codes.length, COLLIDING)
        votes = collide(codes["signs"], table, codes.length)
        return Selection(select_by_votes(votes, budget.count, codes.length, budget.width))

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        """The `top_k` best of the candidates by the estimate of the mean query's inner product with each key."""
        scores = estimate_scores(encoded(query, "rotated"), codes["codes"], codes["weights"], selection.indices)
        return keep_best(selection, scores, top_k)
