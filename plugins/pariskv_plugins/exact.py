"""The oracle: ranks the zone's tokens by their true attention scores, to measure the others by. It saves nothing.

A group of query heads shares its keys, so its scores are combined, by the option `combine`:

    mean_query      score of the mean of the queries
    max_logit       highest score of any head
    sum_softmax     sum of the heads' probabilities, each normalised over the whole history (default)
    max_softmax     highest of these probabilities
    per_query_head  heads choose apart; the union is attended, each head to its own tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pariskv_kernels.select import compact, select_by_scores
from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Query, Selection, Tensors
from pariskv_plugins.keep import keep_best

PER_QUERY_HEAD = "per_query_head"

# From the scores [B, H, G, N], -inf where there is no token, to the ranking [B, H, N].
# Probabilities are compared as logarithms: far tokens would all be 0.
COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean_query": lambda scores: scores.squeeze(2),  # the queries were averaged
    "max_logit": lambda scores: scores.amax(2),
    "sum_softmax": lambda scores: scores.log_softmax(-1).logsumexp(2),
    "max_softmax": lambda scores: scores.log_softmax(-1).amax(2),
}


def combined_with_steady(scores: Tensor, combine: str, steady: Tensor | None) -> Tensor:
    """As `COMBINE` has it, but with probabilities over `steady` [B, H, G], the log-sum-exp over sink and ring, too.

    Else a head that attends mostly to those would count as much as the others.
    """
    if steady is not None and combine in ("sum_softmax", "max_softmax"):
        scores = torch.cat((scores, steady.to(scores.dtype).unsqueeze(-1)), dim=-1)
        return COMBINE[combine](scores)[..., :-1]
    return COMBINE[combine](scores)


@dataclass(frozen=True)
class Options:
    combine: str = "sum_softmax"  # mean_query, max_logit, sum_softmax, max_softmax, per_query_head


class Exact(Retriever):
    """Its codes are the keys themselves.

    The budget of `coarse_select` counts candidates, so with a budget of top_k it is the oracle alone;
    `rerank` gives the same choice from any superset of it. With per_query_head every head takes as many,
    and the selection is G times as wide.
    """

    format = "keys"
    graph_safe = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        names = (*COMBINE, PER_QUERY_HEAD)
        if self.options.combine not in names:
            raise ConfigError(f"exact: combine={self.options.combine!r}; set it to one of {', '.join(names)}")
        self.selects_per_query_head = self.options.combine == PER_QUERY_HEAD
        normalises = self.options.combine in ("sum_softmax", "max_softmax")
        self.reads_steady = frozenset({"coarse_select", "rerank"} if normalises else ())

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity, keys=CodeField((TOKENS, layer.head_dim), layer.dtype))

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"keys": keys}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        scores, tokens = self.score(query, codes)
        everything = Selection(tokens)
        if self.selects_per_query_head:
            return choose_per_head(everything, scores, budget.width, budget.count)
        combined = combined_with_steady(scores, self.options.combine, query.steady)
        return Selection(select_by_scores(combined, tokens, budget.width, budget.count))

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        scores, _ = self.score(query, codes)
        slots = selection.indices.clamp(min=0).long()
        if self.selects_per_query_head:
            scores = scores.gather(-1, slots.unsqueeze(2).expand(-1, -1, scores.shape[2], -1))
            return choose_per_head(selection, scores, top_k)
        combined = combined_with_steady(scores, self.options.combine, query.steady)
        return keep_best(selection, combined.gather(-1, slots), top_k)

    def score(self, query: Query, codes: Codes) -> tuple[Tensor, Tensor]:
        """Scores [B, H, G or 1, N] float32 over the whole capacity, and the tokens' positions [B, H, N].

        Past a row's length the scores are -inf and the positions -1.
        """
        heads, keys = query.heads.float(), codes["keys"]
        if self.options.combine == "mean_query":
            heads = heads.mean(2, keepdim=True)
        scores = heads @ keys.float().transpose(-1, -2) * query.scaling
        if query.softcap is not None:
            scores = query.softcap * torch.tanh(scores / query.softcap)
        positions = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device)
        tokens = torch.where(positions < codes.length.view(-1, 1, 1), positions, -1)  # [B, 1, N]
        scores = torch.where(tokens.unsqueeze(2) >= 0, scores, -torch.inf)
        return scores, tokens.expand(-1, keys.shape[1], -1)


def choose_per_head(candidates: Selection, scores: Tensor, width: int, count: Tensor | None = None) -> Selection:
    """The best candidates of each query head by scores [B, H, G, C], as their union of G x width slots.

    The bias is that of the candidates (0 without one) where a head chose the token, else -inf. A candidate whose
    bias is -inf for a head is none of that head's. Of no candidates there is no choice: they come back as they are.
    """
    indices, group = candidates.indices, scores.shape[2]
    num_candidates = indices.shape[-1]
    if not num_candidates:
        return candidates
    places = torch.arange(num_candidates, dtype=torch.int32, device=indices.device)
    places = torch.where(indices >= 0, places, -1).repeat_interleave(group, dim=1)  # [B, H * G, C]
    if candidates.bias is not None:
        places = places.masked_fill(candidates.bias.flatten(1, 2) == -torch.inf, -1)
    chosen = select_by_scores(scores.flatten(1, 2), places, width, count)
    taken = torch.zeros(*places.shape[:2], num_candidates + 1, dtype=torch.bool, device=indices.device)
    taken.scatter_(-1, torch.where(chosen < 0, num_candidates, chosen).long(), True)
    taken = taken[..., :num_candidates].reshape(scores.shape)  # [B, H, G, C]

    union = compact(taken.any(2), group * width)
    empty, slots = union < 0, union.clamp(min=0).long()
    bias = torch.where(taken, 0.0 if candidates.bias is None else candidates.bias.float(), -torch.inf)
    bias = bias.gather(-1, slots.unsqueeze(2).expand(-1, -1, group, -1))
    return replace(
        candidates,
        indices=indices.gather(-1, slots).masked_fill(empty, -1),
        bias=bias.masked_fill(empty.unsqueeze(2), -torch.inf),
    )


@hookimpl
def register_retrievers(register: Register) -> None:
    register("exact", Exact, options=Options)
