"""PQCache (arXiv 2407.12820): product quantisation, trained on the prompt, scores every token from a table.

Section 3 of the paper. A key is cut into `subvectors` parts; for each, K-means over the prompt's keys gives 2 ** `bits`
centroids, and a token's code is the number of the nearest. A query's inner products with all centroids are a small
table T_j; the estimate of q.k is the sum over j of T_j[code_j] (asymmetric distance computation, ADC), and the tokens
with the highest combined estimates are fetched and attended to exactly.

    lloyd.py   K-means by Lloyd's iteration, in plain torch on every device

`fit` trains when the prefill ends. The centroids are then fixed: what is generated gets the nearest existing one, and
what drifts away from the prompt is described less and less well. With `refresh`, which the paper does not have, they
are trained again on the whole zone whenever as many tokens have joined it. A group of query heads shares its keys, so
its estimates are combined, by the option `combine` with the names of `exact`; the paper's is sum_softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pariskv_kernels.select import select_by_scores
from torch import Tensor

from pariskv.errors import ConfigError, PluginContractError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Prefill, Query, Selection, Tensors
from pariskv_plugins.exact import COMBINE, PER_QUERY_HEAD, choose_per_head
from pariskv_plugins.pqcache.lloyd import kmeans, nearest

MAX_BITS = 8
"""A code is a byte."""
MAX_HEAD_DIM = 1024
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Options:
    subvectors: int = 2  # parts of a key that are coded apart, m
    bits: int = 6  # of a part's code: 2 ** bits centroids
    combine: str = "sum_softmax"  # sum_softmax, max_softmax, max_logit, mean_query, per_query_head
    max_iterations: int = 25  # of the K-means
    max_seconds: float = 2.0  # that a layer's K-means may take, shared by the rows; at least 3 iterations run
    seed: int = 0  # of the centroids that it starts from
    refresh: int = 0  # tokens that join the zone between two trainings; 0: never, as published


class PQCache(Retriever):
    """Two bytes a token, and a scan over all of them."""

    graph_safe = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        check_options(self.options)
        self.format = f"pq-m{self.options.subvectors}-b{self.options.bits}"
        self.selects_per_query_head = self.options.combine == PER_QUERY_HEAD

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        """codes [B, H, m, N]: the number of each part's centroid."""
        parts = self.options.subvectors
        if layer.head_dim % parts:
            raise ConfigError(
                f"pqcache: subvectors={parts} does not divide the heads' {layer.head_dim} coordinates; "
                f"set it to a divisor"
            )
        return Codes.empty(layer, capacity, codes=CodeField((parts, TOKENS), torch.uint8))

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        """codebooks [B, H, m, C, D / m]: every row's own, trained on the keys of its zone."""
        parts, num_centroids = self.options.subvectors, 1 << self.options.bits
        shape = (layer.batch, layer.kv_heads, parts, num_centroids, layer.head_dim // parts)
        codebooks = torch.zeros(shape, device=layer.device)
        rows = [row for row, length in enumerate(prefill.lengths) if length]
        for row in rows:
            keys = torch.cat([keys for keys, _ in prefill.blocks(row)], dim=1)
            codebooks[row] = self.train(keys, self.options.max_seconds / len(rows))
        return {"codebooks": codebooks}

    def train(self, keys: Tensor, seconds: float) -> Tensor:
        """The centroids [H, m, C, D / m] of one row's keys [H, n, D]: all heads and parts side by side."""
        points = self.parts_of(keys)  # [H, m, n, D / m]
        options = self.options
        found = kmeans(points.flatten(0, 1), 1 << options.bits, options.seed, options.max_iterations, seconds)
        return found.view(*points.shape[:2], *found.shape[1:])

    def parts_of(self, vectors: Tensor) -> Tensor:
        """Vectors [..., n, D] cut into their parts [..., m, n, D / m]."""
        return vectors.reshape(*vectors.shape[:-1], self.options.subvectors, -1).transpose(-2, -3)

    @hookimpl
    def is_stale(self, keys: Tensor, state: Tensors, fitted: list[int], since: list[int]) -> list[bool]:
        refresh = self.options.refresh
        return [bool(refresh) and tokens >= refresh for tokens in since]

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"codes": nearest(self.parts_of(keys), state["codebooks"]).to(torch.uint8)}

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        """tables [B, H, m, G or 1, C]: inner products of each part of the queries with its centroids."""
        heads = heads.float()
        if self.options.combine == "mean_query":
            heads = heads.mean(2, keepdim=True)
        return {"tables": self.parts_of(heads) @ state["codebooks"].mT}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        scores, tokens = estimate(query, codes)
        if self.selects_per_query_head:
            return choose_per_head(Selection(tokens), scores, budget.width, budget.count)
        combined = COMBINE[self.options.combine](scores)
        return Selection(select_by_scores(combined, tokens, budget.width, budget.count))


def estimate(query: Query, codes: Codes) -> tuple[Tensor, Tensor]:
    """Estimated scores [B, H, G or 1, N] float32 over the whole capacity, and the tokens' positions [B, H, N].

    Past a row's length the scores are -inf and the positions -1.
    """
    if query.encoded is None or "tables" not in query.encoded:
        raise PluginContractError(
            "pqcache: query.encoded has no 'tables'; pass what encode_query of the codes' producer returned"
        )
    numbers = codes["codes"]
    batch, heads, _, capacity = numbers.shape
    positions = torch.arange(capacity, dtype=torch.int32, device=numbers.device)
    tokens = torch.where(positions < codes.length.view(-1, 1, 1), positions, -1)  # [B, 1, N]
    scores = sum_of_entries(query.encoded["tables"] * query.scaling, numbers.where((tokens >= 0).unsqueeze(2), 0))
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    scores.masked_fill_((tokens < 0).unsqueeze(2), -torch.inf)
    return scores, tokens.expand(batch, heads, -1)


def sum_of_entries(tables: Tensor, numbers: Tensor) -> Tensor:
    """The sum over the parts of each token's entries: tables [B, H, m, G, C], numbers [B, H, m, N] to [B, H, G, N]."""
    scores, *others = (
        table.gather(-1, number.long().unsqueeze(2).expand(-1, -1, table.shape[2], -1))
        for table, number in zip(tables.unbind(2), numbers.unbind(2), strict=True)
    )
    for entries in others:
        scores += entries
    return scores


def check_options(options: Options) -> None:
    """Raise ConfigError for the first option that means nothing."""
    ranges = {"subvectors": (1, MAX_HEAD_DIM), "bits": (1, MAX_BITS), "seed": (0, MAX_SEED)}
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"pqcache: {name}={value!r}; set it to an integer from {least} to {most}")
    names = (*COMBINE, PER_QUERY_HEAD)
    if options.combine not in names:
        raise ConfigError(f"pqcache: combine={options.combine!r}; set it to one of {', '.join(names)}")
    if options.max_iterations < 1 or not options.max_seconds > 0:
        raise ConfigError(
            f"pqcache: max_iterations={options.max_iterations}, max_seconds={options.max_seconds}; "
            f"set both above 0, or the centroids are keys drawn at random"
        )
    if type(options.refresh) is not int or options.refresh < 0:
        raise ConfigError(f"pqcache: refresh={options.refresh!r}; set it to a number of tokens, or to 0 for never")


@hookimpl
def register_retrievers(register: Register) -> None:
    register("pqcache", PQCache, options=Options)
