"""`pariskv`: ParisKV's codes in a frame learnt from the prompt, linear votes, and heads that speak for themselves.

The paper's vote ranks the patterns of a subspace and keeps the rank's tier. The linear one keeps the pattern's inner
product itself, and multiplies the sum by the key's norm; so it estimates the inner product, for a byte a subspace as
before and a byte for the norm. The rerank scores the candidates for every head of a group and adds their
probabilities, as attention will: normalised over sink and ring, too, so that a head that looks elsewhere does not crowd
the others out.

The candidates that lose are not forgotten: their scores were estimated, so their weight is known, and what a head would
find there follows from the mean value of the zone and how its values go with its keys (`rest: gaussian`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from pariskv_kernels.collide import collide, collide_scaled
from pariskv_kernels.combine import combine_estimates, sum_estimates
from pariskv_kernels.encode import encode_keys
from pariskv_kernels.frame import queries_to_frame, to_frame
from pariskv_kernels.linear import linear_table
from pariskv_kernels.rerank import estimate_scores
from pariskv_kernels.rest import Known, Weighed, estimate_rest, weigh_candidates
from pariskv_kernels.select import select_by_votes
from pariskv_kernels.tiers import MAX_WEIGHT, tier_table
from torch import Tensor

from pariskv.attention import merge
from pariskv.beside import Beside, PartialBeside
from pariskv.errors import ConfigError
from pariskv.hookspecs import Need, Retriever, hookimpl
from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Partial, Prefill, Query, Selection, Tensors
from pariskv_plugins.keep import keep_best
from pariskv_plugins.paris.format import check_options, encoded, fields
from pariskv_plugins.paris.frame import learn_frame
from pariskv_plugins.paris.paper import COLLIDING

CHOICES = {
    "centre": ("none", "prefill"),
    "vote": ("tiers", "linear"),
    "precondition": ("none", "model", "prompt", "both"),
    "vote_combine": ("mean_query", "weighted_query", "sum_votes"),
    "combine": ("mean_query", "max_logit", "sum_softmax", "max_softmax"),
    "rest": ("none", "gaussian"),
}

PROBABILITIES = ("sum_softmax", "max_softmax")
"""The ways to combine heads whose scores are logarithms of probabilities."""

REFIT_SHARE = 8
"""A frame is not learnt anew before the zone has grown by one part in so many."""


@dataclass(frozen=True)
class Options:
    subspace_dim: int = 8  # coordinates per subspace, m: 4 or 8
    seed: int = 42  # of the rotation's random signs
    centre: str = "prefill"  # what is subtracted from keys before they are encoded: none, prefill (the zone's mean)
    precondition: str = "both"  # whose queries shape the frame: none, model (its calibration), prompt, both
    exponent: float = 1.0  # of the preconditioner: 1 as derived, less for a milder one
    vote: str = "linear"  # of a pattern: tiers (its rank's, as published), linear (its inner product)
    norm_weight: bool = True  # votes times the norms of the keys, one byte a key; with linear votes
    vote_combine: str = "weighted_query"  # of a group's heads in the vote: mean_query, weighted_query, sum_votes
    combine: str = "sum_softmax"  # of a group's heads in the rerank: mean_query, max_logit, sum_softmax, max_softmax
    min_share: float = 0.0  # a row's least estimated share of the group's attention to be fetched; 0: top_k rows
    rest: str = "gaussian"  # attention to what is not fetched: none (forgotten) or gaussian (estimated and added)
    recentre: float = 0.5  # how far the new keys' mean may lie off centre, a share of their power; 0: never learn anew


class ParisKV(Retriever):
    """Sign patterns propose, 4-bit codes decide, in the frame that suits the prompt's keys and queries."""

    graph_safe = True
    candidate_ratios = ((0, 0.25), (5_000, 0.125), (10_000, 0.1), (30_000, 0.05))

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        check_framed_options(self.options)
        self.format = f"pariskv-m{self.options.subspace_dim}-framed"
        self.combine = self.options.combine
        self.reads_steady = frozenset({"rerank"} if self.options.combine in PROBABILITIES else ())
        self.adapts_top_k = self.options.min_share > 0
        self.has_norms = self.options.vote == "linear" and self.options.norm_weight
        self.estimates_rest = self.options.rest == "gaussian"
        self.needs: frozenset[Need] = frozenset(self._needs())

    def _needs(self) -> list[Need]:
        needs: list[Need] = ["recent_queries"] if self.options.vote_combine == "weighted_query" else []
        if self.options.precondition in ("model", "both"):
            needs.append("model_moment")
        if self.options.precondition != "none":  # in place of a calibration that is not there, too
            needs.append("query_moment")
        return needs

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        """The fields of `format.py`, and norms [B, H, N]: levels on a logarithmic scale."""
        own = fields("pariskv", layer.head_dim, self.options.subspace_dim)
        if self.has_norms:
            own["norms"] = CodeField((TOKENS,), torch.uint8)
        return Codes.empty(layer, capacity, **own)

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        options, weighted = self.options, self.options.vote_combine == "weighted_query"
        how = options.centre, options.precondition, options.exponent, weighted, options.seed
        return learn_frame(layer, prefill, *how, with_values=self.estimates_rest)

    @hookimpl
    def is_stale(self, keys: Tensor, state: Tensors, fitted: list[int], since: list[int]) -> list[bool]:
        """Where the mean of what has come since the frame was learnt lies too far off its centre.

        That is asked of the newest block, and not before so much has come that learning anew costs little beside it;
        so the host waits for the device that seldom, too.
        """
        limit = self.options.recentre
        due = [many * REFIT_SHARE >= tokens for tokens, many in zip(fitted, since, strict=True)]
        if not limit or not any(due):
            return [False] * len(since)
        off_centre = ((keys.float().mean(2) - state["centre"]).unsqueeze(2) @ state["keys_to"]).squeeze(2)  # [R, H, P]
        share = off_centre.square().sum(2) / state["power"].clamp(min=torch.finfo(torch.float32).tiny)
        return [is_due and one > limit for is_due, one in zip(due, share.mean(1).tolist(), strict=True)]

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        framed = to_frame(keys, state["centre"], state["keys_to"], state["power"])
        codes = encode_keys(framed.z, self.options.subspace_dim, None)._asdict()
        return {**codes, "norms": framed.norms} if self.has_norms else codes

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        """The step's queries in the keys' frame: `heads`, `rotated`, `offset`; and what the `rest` is estimated by."""
        framed = queries_to_frame(heads, state["centre"], state["queries_to"], state["weights"])._asdict()
        return {**framed, **{name: state[name] for name in ("mean_value", "slopes") if self.estimates_rest}}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        """The `budget.count` tokens with the highest votes."""
        signs, length = codes["signs"], codes.length
        if self.options.vote == "linear":
            table = linear_table(encoded(query, "rotated"), self.options.subspace_dim)
            votes = collide_scaled(signs, table, length, codes["norms"] if self.has_norms else None)
        elif self.options.vote_combine == "sum_votes":
            heads = encoded(query, "heads").unbind(2)
            tables = [tier_table(head.contiguous(), codes["counts"], length, COLLIDING) for head in heads]
            votes = collide(signs, torch.stack(tables).sum(0, dtype=torch.uint8), length, MAX_WEIGHT * len(heads))
        else:
            votes = collide(signs, tier_table(encoded(query, "rotated"), codes["counts"], length, COLLIDING), length)
        return Selection(select_by_votes(votes, budget.count, length, budget.width))

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        """The `top_k` best of the candidates by the heads' estimated scores; of these, those that are worth a row."""
        heads, offset = encoded(query, "heads"), encoded(query, "offset")
        estimated = codes["codes"], codes["weights"], selection.indices
        if self.options.combine == "mean_query":
            scores, sums = estimate_scores(heads.mean(2), *estimated), None
        else:
            steady = torch.full_like(offset, -torch.inf) if query.steady is None else query.steady.float()
            how = self.options.combine, query.scaling, query.softcap
            scores, sums = combine_estimates(heads, *estimated, offset, steady, *how, with_sums=self.estimates_rest)
        least = self._least(query.heads.shape[2])
        if not self.estimates_rest:
            return keep_best(selection, scores, top_k, least)
        # Beside the choice of the best, and then beside their fetch: nobody needs it before `attend`.
        weighed = Beside(offset.device, lambda: self._weigh(query, codes, selection.indices, sums))
        kept = keep_best(selection, scores, top_k, least)
        rest = weighed.then(lambda found: self._rest(query, codes, found, kept))
        return replace(kept, partial=PartialBeside(rest))

    def _weigh(self, query: Query, codes: Codes, candidates: Tensor, sums: Tensor | None) -> Weighed:
        """What the candidates, and the tokens that are none, weigh; sums: of the candidates, where they are known."""
        is_mean = self.options.centre == "prefill"  # around another centre the mean score is not known
        zone = Known(codes.length, encoded(query, "offset") if is_mean else None, encoded(query, "slopes"))
        sums = self._sums(query, codes, candidates) if sums is None else sums
        return weigh_candidates(query.heads, sums, zone, query.scaling)

    def _rest(self, query: Query, codes: Codes, weighed: Weighed, kept: Selection) -> Partial:
        """Attention to the zone's tokens that were not kept, estimated, and any that was done before."""
        chosen = self._sums(query, codes, kept.indices)
        rest = Partial(*estimate_rest(weighed, chosen, encoded(query, "mean_value")))
        return rest if kept.partial is None else Partial(*merge(kept.partial, rest))

    def _sums(self, query: Query, codes: Codes, tokens: Tensor) -> Tensor:
        estimated = encoded(query, "heads"), codes["codes"], codes["weights"], tokens
        return sum_estimates(*estimated, encoded(query, "offset"), query.scaling, query.softcap)

    def _least(self, group: int) -> float:
        """The score of a row with `min_share`: of the mean of the heads' probabilities, or of the highest."""
        share = self.options.min_share * (group if self.options.combine == "sum_softmax" else 1)
        return math.log(share) if share else -math.inf


def check_framed_options(options: Options) -> None:
    """Raise ConfigError for the first option that means nothing."""
    check_options("pariskv", options.subspace_dim, options.seed)
    for name, choices in CHOICES.items():
        if getattr(options, name) not in choices:
            raise ConfigError(f"pariskv: {name}={getattr(options, name)!r}; set it to one of {', '.join(choices)}")
    if not 0 <= options.exponent <= 2:
        raise ConfigError(f"pariskv: exponent={options.exponent}; set it to a number from 0 to 2")
    if not 0 <= options.min_share < 1:
        raise ConfigError(f"pariskv: min_share={options.min_share}; set it to a number from 0 (top_k rows) to below 1")
    if options.min_share and options.combine not in PROBABILITIES:
        raise ConfigError(
            f"pariskv: min_share={options.min_share} with combine={options.combine}, whose scores are no shares of "
            f"attention; set combine to {' or '.join(PROBABILITIES)}"
        )
    if not options.recentre >= 0:
        raise ConfigError(f"pariskv: recentre={options.recentre}; set it above 0, or to 0 for never")
    if options.vote == "linear" and options.vote_combine == "sum_votes":
        raise ConfigError(
            "pariskv: vote_combine=sum_votes with vote=linear; linear votes of a sum are the sum of the votes: "
            "set vote_combine to mean_query or weighted_query"
        )
