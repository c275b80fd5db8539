"""SnapKV (arXiv 2404.14469): the prompt's last queries vote, once, for the tokens that all steps will attend to.

When the prefill ends, the attention of the last `window` queries is averaged, pooled over neighbouring positions, so
that what belongs together stays together, and averaged over the group (section 4). Every step then takes the
positions with the most votes, always the same ones; generated tokens stay in the dense part.

Departures. The votes are attention within the zone: sink and local tokens, which are attended in any case, take no
share. The zone is to lie before the window, so `window.local` should be at least `window` tokens. Nothing votes for
what a later turn adds: of its tokens only those that are still in the ring are attended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from pariskv.errors import ConfigError, PluginContractError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import RECENT_QUERIES, Budget, Codes, LayerInfo, Prefill, Query, Selection, Tensors

# The zone's edges are no edges of the text: what lies beyond them counts neither as 0 nor as anything else.
POOLING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "max": lambda votes, kernel: max_pool1d(votes, kernel, stride=1, padding=kernel // 2),
    "mean": lambda votes, kernel: avg_pool1d(votes, kernel, stride=1, padding=kernel // 2, count_include_pad=False),
}


@dataclass(frozen=True)
class Options:
    keep: int = 2048  # positions kept per key/value head; a step takes the best top_k of them
    window: int = 32  # of the prompt's last queries, how many vote: at most 64
    kernel: int = 7  # positions that are pooled, an odd number; 1: none
    pooling: str = "max"  # max or mean


class SnapKV(Retriever):
    """Its index is one list of positions per key/value head, the most voted first; tokens have no codes."""

    format = "snapkv"
    indexes = "prompt"
    needs = frozenset({"recent_queries"})
    graph_safe = True
    combine = "sum_softmax"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        check_options(self.options)

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity)

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        """kept [B, H, keep] int32: positions by falling votes, then -1."""
        shape = (layer.batch, layer.kv_heads, self.options.keep)
        kept = torch.full(shape, -1, dtype=torch.int32, device=layer.device)
        for row, length in enumerate(prefill.lengths):
            if length:
                order = self.votes(layer, prefill, row).sort(dim=-1, descending=True, stable=True).indices
                kept[row, :, :length] = order[:, : self.options.keep]
        return {"kept": kept}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {}

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        return {"kept": state["kept"]}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        if query.encoded is None or "kept" not in query.encoded:
            raise PluginContractError("snapkv: query.encoded has no 'kept'; pass what snapkv's encode_query returned")
        kept = query.encoded["kept"][..., : budget.width]
        kept = pad(kept, (0, budget.width - kept.shape[-1]), value=-1)
        slots = torch.arange(budget.width, device=kept.device)
        return Selection(torch.where(slots < budget.count.view(-1, 1, 1), kept, -1))

    def votes(self, layer: LayerInfo, prefill: Prefill, row: int) -> Tensor:
        """Votes [H, N] for the tokens of one row's zone."""
        attention = mean_attention(layer, prefill, row, self.options.window)
        return POOLING[self.options.pooling](attention, self.options.kernel).mean(1)


def mean_attention(layer: LayerInfo, prefill: Prefill, row: int, window: int) -> Tensor:
    """Attention of a row's last `window` queries to its zone, their mean: [H, G, N] float32.

    The zone is read twice, for the softmax's sum and for its terms: scores for all queries at once would not fit.
    """
    assert prefill.recent_queries is not None
    queries = prefill.recent_queries[row, :, :, -window:]
    is_real = (queries != 0).any(-1, keepdim=True)  # a row with fewer tokens has zeros in front

    def blocks() -> Iterator[Tensor]:
        for keys, _ in prefill.blocks(row):
            yield scores_of(queries, keys, layer)

    lse = reduce(torch.logaddexp, (scores.logsumexp(-1, keepdim=True) for scores in blocks()))
    sums = [(scores - lse).exp().where(is_real, 0).sum(2) for scores in blocks()]
    return torch.cat(sums, dim=-1) / is_real.sum(2).clamp(min=1)


def scores_of(queries: Tensor, keys: Tensor, layer: LayerInfo) -> Tensor:
    """Scaled, soft-capped scores [H, G, W, n] of queries [H, G, W, D] and a block of keys [H, n, D]."""
    scores = queries.float() @ keys.float().mT.unsqueeze(1) * layer.scaling
    return scores if layer.softcap is None else layer.softcap * torch.tanh(scores / layer.softcap)


def check_options(options: Options) -> None:
    for name in ("keep", "window", "kernel"):
        value = getattr(options, name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"snapkv: {name}={value!r}; set it to an integer from 1")
    if options.window > RECENT_QUERIES:
        raise ConfigError(f"snapkv: window={options.window}; set it to at most {RECENT_QUERIES}")
    if options.kernel % 2 == 0:
        raise ConfigError(f"snapkv: kernel={options.kernel}; set it to an odd number, which has a middle")
    if options.pooling not in POOLING:
        raise ConfigError(f"snapkv: pooling={options.pooling!r}; set it to one of {', '.join(POOLING)}")


@hookimpl
def register_retrievers(register: Register) -> None:
    register("snapkv", SnapKV, options=Options)
