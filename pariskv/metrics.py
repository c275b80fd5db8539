r"""How much of dense attention a retriever finds, in measures with a definition. The page `docs/metrics.md` has them.

One decode step of one layer; every key/value head by itself, with its G query heads q_g. Its history are n tokens,
of which the N tokens of the zone Z can be retrieved; the others (sink, ring) are attended in any case.

    p_gi = softmax over all n tokens of cap(s q_g . k_i)    the exact probabilities, what is dense included
    P_i  = sum over g of p_gi                               the oracle's ranking of a token
    O(k) = the min(k, N) tokens of Z with the largest P_i   the oracle at k

    C    = what `coarse_select` proposes
    F    = the distinct positions that are fetched
    S_g  = those of F that head g attends to: its bias is not -inf
    S    = the union of all S_g

    candidate_recall = |C & O(K)| / |O(K)|                  K = top_k
    recall           = |S & O(K)| / |O(K)|
    mass             = 1/G sum over g, i in S_g of p_gi
    oracle_mass      = 1/G sum over i in O(|F|) of P_i      the oracle at this selection's own distinct count
    mass_ratio       = mass / oracle_mass                   never above 1
    output_error     = 1/G sum over g of |o_g - o*_g| / |o*_g|

With an empty zone nothing can be lost: both recalls and the ratio are 1. Where nothing is fetched of a zone that is
not empty, the ratio is 0. What is attended without a token's own row (extra rows, a partial attention) is part of
o_g and of no set; where a selection is a partial attention without a slot, the sets are unknown and so are their
measures.

    kl               = sum over v of d_v (log d_v - log r_v)   in nats; d dense, r the retriever's distribution
    argmax_agreement = 1 where both have the same most probable token, else 0

Everything is summed as it comes: `Fidelity` holds layers x heads + steps numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.types import TOKENS, Query, Selection, Tensors

if TYPE_CHECKING:
    from pariskv.layer import LayerState

LAYER_MEASURES = ("candidate_recall", "recall", "mass", "oracle_mass", "mass_ratio", "output_error")
"""What `measure` returns of one step of a layer, beside `SIZES`."""

SIZES = ("fetched", "attended")
"""What it returns of the sizes: distinct rows fetched; tokens that a query head attends to, sink and ring included."""

LOGIT_MEASURES = ("kl", "argmax_agreement")


@dataclass(frozen=True)
class Truth:
    """Dense attention of one step of one layer.

    probabilities  [B, H, G, n] float64, 0 past a row's length
    out            [B, H, G, D]
    zone           bool [B, n], the tokens that can be retrieved
    steady         int [B], how many tokens are attended in any case
    start          position of the zone's first token: the size of the sink
    """

    probabilities: Tensor
    out: Tensor
    zone: Tensor
    steady: Tensor
    start: int


@dataclass(frozen=True)
class Observed:
    """What a retriever did at that step.

    candidates  int32 [B, H, C], zone-relative, -1 where empty; None: the layer retrieved nothing
    selection   what was fetched
    out         [B, H, G, D], what attention gave
    """

    candidates: Tensor | None
    selection: Selection | None
    out: Tensor


@torch.no_grad()
def dense_truth(
    query: Query, keys: Tensor, values: Tensor, lengths: Sequence[int], zones: Sequence[int], start: int
) -> Truth:
    """Dense attention of the queries [B, H, G, D] over keys and values [B, H, n, D].

    lengths, zones  of each row: its tokens, and how many of them are in the zone, which begins at `start`
    """
    exact = torch.promote_types(keys.dtype, torch.float32)
    scores = query.heads.to(exact) @ keys.to(exact).mT * query.scaling
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    positions = torch.arange(keys.shape[2], device=keys.device)
    is_token = _below(positions, lengths)
    probabilities = scores.double().masked_fill(~is_token[:, None, None], -torch.inf).softmax(-1)
    values = values.to(exact).where(is_token[:, None, :, None], 0)
    zone = (positions >= start) & _below(positions, [start + zone for zone in zones])
    return Truth(probabilities, probabilities.to(exact) @ values, zone, is_token.sum(-1) - zone.sum(-1), start)


def _below(positions: Tensor, ends: Sequence[int]) -> Tensor:
    """Which positions [n] are below each row's end, bool [B, n]."""
    return positions < torch.tensor(ends, device=positions.device).unsqueeze(1)


@torch.no_grad()
def measure(truth: Truth, seen: Observed, top_k: int) -> dict[str, Tensor]:
    """The `LAYER_MEASURES` and `SIZES` of a step, each [B, H] float64; without those that cannot be known.

    Raises PluginContractError for a position outside of the zone.
    """
    combined = truth.probabilities.sum(2)
    group = truth.probabilities.shape[2]
    fetched = _members(None if seen.selection is None else seen.selection.indices, truth, "the selection")
    counts = fetched.sum(-1)
    found = {
        "output_error": relative_error(seen.out, truth.out).mean(-1),
        "fetched": counts.double(),
    }
    if seen.selection is not None and seen.selection.partial is not None and not seen.selection.indices.shape[-1]:
        return found
    candidates = _members(seen.candidates, truth, "coarse_select")
    attended = _attended(seen.selection, fetched, truth)  # [B, H, G, n]
    mass = truth.probabilities.where(attended, 0).sum((2, 3)) / group

    sizes = truth.zone.sum(-1, keepdim=True)  # [B, 1]
    most = min(max(top_k, int(counts.max())), combined.shape[-1])
    ranked = combined.masked_fill(~truth.zone.unsqueeze(1), -1).topk(most)
    wanted = sizes.clamp(max=top_k)
    oracle_mass = _sum_of_first(ranked.values, counts) / group
    return found | {
        "candidate_recall": _share(candidates, ranked.indices, wanted),
        "recall": _share(attended.any(2), ranked.indices, wanted),
        "mass": mass,
        "oracle_mass": oracle_mass,
        "mass_ratio": _ratio(mass, oracle_mass, sizes),
        "attended": truth.steady.unsqueeze(-1) + attended.sum(-1).double().mean(-1),
    }


def refuse_outside(indices: Tensor, zones: Sequence[int], what: str) -> None:
    """Raise PluginContractError where positions [B, H, K] go beyond the rows' zones."""
    for row, zone in zip(indices, zones, strict=True):
        if row.numel() and int(row.max()) >= zone:
            raise PluginContractError(
                f"{what} has the position {int(row.max())}, but the row's zone has {zone} tokens; "
                f"select below codes.length, and mark empty slots by -1"
            )


def _members(indices: Tensor | None, truth: Truth, what: str) -> Tensor:
    """Zone-relative positions [B, H, K] as a mask over the history, bool [B, H, n]; a position counts once."""
    batch, heads, _, num_tokens = truth.probabilities.shape
    mask = truth.zone.new_zeros(batch, heads, num_tokens + 1)
    if indices is not None:
        refuse_outside(indices, truth.zone.sum(-1).tolist(), what)
        mask = mask.scatter(-1, torch.where(indices < 0, num_tokens, indices.long() + truth.start), True)
    return mask[..., :num_tokens]


def _attended(selection: Selection | None, fetched: Tensor, truth: Truth) -> Tensor:
    """Which tokens each query head attends to of those that are fetched, bool [B, H, G, n]."""
    shape = truth.probabilities.shape
    if selection is None or selection.bias is None:
        return fetched.unsqueeze(2).expand(shape)
    num_tokens = shape[-1]
    slots = torch.where(selection.indices < 0, num_tokens, selection.indices.long() + truth.start)
    slots = slots.unsqueeze(2).expand_as(selection.bias)
    slots = slots.where(selection.bias > -torch.inf, num_tokens)
    mask = torch.zeros(*shape[:3], num_tokens + 1, dtype=torch.bool, device=fetched.device)
    return mask.scatter(-1, slots, True)[..., :num_tokens]


def _sum_of_first(ranked: Tensor, counts: Tensor) -> Tensor:
    """The sum of the first counts [B, H] of the values [B, H, k]."""
    ranks = torch.arange(ranked.shape[-1], device=ranked.device)
    return ranked.where(ranks < counts.unsqueeze(-1), 0).sum(-1)


def _share(mask: Tensor, ranked: Tensor, wanted: Tensor) -> Tensor:
    """How many of the first `wanted` [B, 1] ranked tokens [B, H, k] are in the mask [B, H, n]; 1 of none."""
    ranks = torch.arange(ranked.shape[-1], device=ranked.device)
    found = (mask.gather(-1, ranked) & (ranks < wanted.unsqueeze(-1))).sum(-1)
    return torch.where(wanted > 0, found.double() / wanted.clamp(min=1), 1.0)


def _ratio(mass: Tensor, oracle: Tensor, sizes: Tensor) -> Tensor:
    # The same numbers summed in another order may differ in their last bit.
    ratio = torch.where(oracle > 0, mass / oracle.clamp(min=torch.finfo(oracle.dtype).tiny), 0.0).clamp(max=1.0)
    return torch.where(sizes > 0, ratio, 1.0)


def relative_error(out: Tensor, wanted: Tensor) -> Tensor:
    """|out - wanted| / |wanted| over the last axis, float64; 0 where both are 0."""
    out, wanted = out.double(), wanted.double()
    difference, length = (out - wanted).norm(dim=-1), wanted.norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / length)


def kl_divergence(logits: Tensor, dense: Tensor) -> Tensor:
    """KL(dense || logits) in nats [B], of logits [B, V]."""
    wanted, given = dense.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (wanted.exp() * (wanted - given)).sum(-1)


def argmax_agreement(logits: Tensor, dense: Tensor) -> Tensor:
    """1 where both logits [B, V] are largest at the same token, else 0: [B] float64."""
    return (logits.argmax(-1) == dense.argmax(-1)).double()


def measure_logits(logits: Tensor, dense: Tensor) -> dict[str, Tensor]:
    """The `LOGIT_MEASURES` of a step, each [B]."""
    return {"kl": kl_divergence(logits, dense), "argmax_agreement": argmax_agreement(logits, dense)}


@dataclass
class Mean:
    """A mean that is added to: a sum of tensors and their number."""

    total: Tensor | None = None
    count: int = 0

    def add(self, values: Tensor) -> None:
        """Add values of the same shape as before."""
        self.total = values.clone() if self.total is None else self.total + values
        self.count += 1

    @property
    def value(self) -> Tensor:
        assert self.total is not None
        return self.total / self.count


@dataclass
class Fidelity:
    """Means of a run's measures: by layer, by head, by step and altogether.

    Every layer, head, row and step counts the same. What comes in is averaged over the rows of the batch.
    """

    layers: dict[int, dict[str, Mean]] = field(default_factory=dict)
    steps: dict[int, dict[str, Mean]] = field(default_factory=dict)

    def add(self, layer: int, step: int, values: Tensors) -> None:
        """Take what `measure` returned, [B, H] each."""
        for name, value in values.items():
            heads = value.double().mean(0).cpu()
            self.layers.setdefault(layer, {}).setdefault(name, Mean()).add(heads)
            self.steps.setdefault(step, {}).setdefault(name, Mean()).add(heads.mean())

    def per_layer(self) -> dict[int, dict[str, float]]:
        """The means over heads and steps, by layer."""
        return {
            layer: {name: float(mean.value.mean()) for name, mean in means.items()}
            for layer, means in sorted(self.layers.items())
        }

    def per_head(self) -> dict[int, dict[str, list[float]]]:
        """The means over the steps, by layer, a number for each key/value head."""
        return {
            layer: {name: mean.value.tolist() for name, mean in means.items()}
            for layer, means in sorted(self.layers.items())
        }

    def per_step(self) -> dict[int, dict[str, float]]:
        """The means over layers and heads, by step."""
        steps = sorted(self.steps.items())
        return {step: {name: float(mean.value) for name, mean in means.items()} for step, means in steps}

    def summary(self) -> dict[str, float]:
        """The means over everything."""
        return mean_of(self.per_layer())


def mean_of(rows: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the rows that have it."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    found = {name: [row[name] for row in rows.values() if name in row] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def index_bytes_per_token(layers: Sequence[LayerState]) -> float:
    """Bytes of the index per token of the zone and key/value head, the mean over the layers that have a zone.

    What does not grow with the tokens (tables, codebooks) is not in it. What a store in host memory keeps on the
    device is: keys at low rank find nothing without it.
    """
    found = [_index_bytes(layer) for layer in layers if layer.store is not None]
    return sum(found) / len(found) if found else 0.0


def _index_bytes(layer: LayerState) -> float:
    codes = [
        item.dtype.itemsize * _entry_size(item.shape) / item.tokens_per_entry
        for one in layer.codes.values()
        for item in one.spec.values()
        if item.reduce is None
    ]
    assert layer.store is not None
    kept = layer.store.device_bytes if layer.pipeline.host_resident else 0
    return sum(codes) + kept / (layer.info.batch * layer.info.kv_heads * max(1, layer.store.capacity))


def _entry_size(shape: Sequence[int]) -> int:
    return math.prod(size for size in shape if size != TOKENS)


def host_bytes_per_step(layers: Mapping[int, LayerState], fidelity: Fidelity) -> float:
    """Bytes of keys and values that a step brings from host memory, all layers and heads together.

    A store that moves less than a key and a value of a row says so by `row_bytes`, one in whose slots rows stay
    by `hit_rate`.
    """
    total = 0.0
    for index, means in fidelity.per_layer().items():
        store, info = layers[index].store, layers[index].info
        if store is not None and store.host_bytes:
            row_bytes = getattr(store, "row_bytes", 2 * info.head_dim * info.dtype.itemsize)
            moved = 1.0 - getattr(store, "hit_rate", 0.0)
            total += means["fetched"] * info.batch * info.kv_heads * row_bytes * moved
    return total
