"""RetroInfer's wave index (arXiv 2505.02922): clusters of tokens, the best exact, the next estimated, the rest dropped.

Tokens are clustered segment by segment. A cluster is known by its mean key c, its mean value and its size n. A step
ranks the clusters by s q.c. The members of the first are selected and attended exactly. Each of the next is attended
as a single row (`Selection.extra`) whose key is c, whose value is the mean value, and whose bias is log n: its
numerator is exp(s q.c) times the sum of the values, its denominator n exp(s q.c).

Where this departs from the paper:

- One segment length for the prompt and for what is generated, that of the paper's updates (1,024 tokens, 64
  clusters); the paper's prompt has segments of 8,192. A segment is a block of the format, so a larger one has
  its tokens wait longer in the dense part. `segment: 8192` is the paper's prompt.
- Keys are centred by the mean of their segment, not of the whole prompt, and the last assignment, too, stays within
  the segment. So a segment's clusters depend on nothing else, and nothing has to be fitted.
- The budget (`top_k`, or `candidates` where another retriever reranks) bounds the exact zone's tokens. A cluster
  that it cuts is split: what fits is exact, the rest is estimated by the cluster's mean. The paper's own bound, 1.8 %
  of the clusters, is the option `exact`.
- The exact zone's rows come from whatever store the layer has; the paper's buffer of clusters on the GPU is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pariskv.errors import ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Query, Rows, Selection, Tensors

MAX_SEGMENT = 1 << 14
"""Places in a segment and sizes of clusters are 16-bit integers."""


@dataclass(frozen=True)
class Options:
    segment: int = 1024  # tokens that are clustered together: how many leave for the index at a time
    cluster: int = 16  # tokens per cluster, on average
    iterations: int = 9  # of spherical k-means
    exact: float = 1.0  # share of the clusters that are exact, at most; published: 0.018. The budget bounds them, too
    estimated: float = 0.232  # share of the clusters that are estimated, those after the exact ones


class RetroInfer(Retriever):
    """A tripartite attention: exact zone, estimated zone, and the rest of the clusters, which is dropped."""

    graph_safe = True
    combine = "sum_softmax"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        check_options(self.options)
        self.block = self.options.segment
        self.format = f"wave-{self.options.segment}-{self.options.cluster}-{self.options.iterations}"

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        """What is known of the clusters, and the segments' tokens in the order of their clusters.

        centroids  [B, H, M, D]  mean key
        means      [B, H, M, D]  mean value
        sizes      [B, H, M]     tokens, 0 where a cluster stayed empty
        members    [B, H, N]     place in its segment of each token, cluster after cluster
        """
        cluster = self.options.cluster
        return Codes.empty(
            layer,
            capacity,
            centroids=CodeField((TOKENS, layer.head_dim), layer.dtype, cluster),
            means=CodeField((TOKENS, layer.head_dim), layer.dtype, cluster, read="part"),
            sizes=CodeField((TOKENS,), torch.int16, cluster),
            members=CodeField((TOKENS,), torch.int16, read="part"),
        )

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        rows, block = keys.shape[0], self.block
        # A row's segment at a time: products of one shape round alike, whatever the batch and the block are.
        segments = [
            self.cluster(keys[row, :, start : start + block], values[row, :, start : start + block])
            for row in range(rows)
            for start in range(0, keys.shape[2], block)
        ]
        whole = {name: torch.cat([segment[name] for segment in segments], 1) for name in segments[0]}
        return {
            name: field.reshape(len(field), rows, -1, *field.shape[2:]).transpose(0, 1) for name, field in whole.items()
        }

    def cluster(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The fields of one segment of one row, keys and values [H, L, D]."""
        centred = keys.float()
        centre = centred.mean(1, keepdim=True)
        centred = centred - centre
        directions = normalize(centred[:, :: self.options.cluster], dim=-1)
        for _ in range(self.options.iterations):
            _, sizes, means = cluster_means(centred, directions, centred)
            directions = torch.where(sizes.unsqueeze(-1) > 0, normalize(means, dim=-1), directions)
        assigned, sizes, both = cluster_means(centred, directions, torch.cat((centred, values.float()), -1))
        centroids, means = both.tensor_split(2, -1)
        return {
            "centroids": (centroids + centre).to(keys.dtype),
            "means": means.to(keys.dtype),
            "sizes": sizes.to(torch.int16),
            "members": assigned.argsort(dim=-1, stable=True).to(torch.int16),
        }

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        capacity = codes["sizes"].shape[-1]
        num_exact = min(share(self.options.exact, capacity), budget.width)
        num_estimated = share(self.options.estimated, capacity)
        num_clusters = codes.length.view(-1, 1, 1) // self.options.cluster  # [B, 1, 1]

        sizes = valid_sizes(codes["sizes"], num_clusters)
        scores = cluster_scores(query, codes["centroids"], sizes)
        ranked = scores.topk(min(num_exact + num_estimated, capacity)).indices  # [B, H, R], the best first
        offered = sizes.gather(-1, ranked)
        taken = exact_tokens(offered, share_of(self.options.exact, num_clusters), budget.count.view(-1, 1, 1))

        best, exact = ranked[..., :num_exact], taken[..., :num_exact]
        starts = (sizes.cumsum(-1) - sizes).gather(-1, best)
        chosen = Selection(first_members(codes["members"], starts, exact, budget.width, self.block))
        if not num_estimated:
            return chosen
        ranks, counts = next_clusters(offered, taken, share_of(self.options.estimated, num_clusters), num_estimated)
        return replace(chosen, extra=estimated_rows(codes, ranked.gather(-1, ranks), counts, query.heads.shape[2]))


def check_options(options: Options) -> None:
    """Raise ConfigError for the first option that means nothing."""
    segment, cluster = options.segment, options.cluster
    if not 1 <= cluster <= segment <= MAX_SEGMENT or segment % cluster:
        raise ConfigError(
            f"retroinfer: segment={segment}, cluster={cluster}; set segment to a multiple of cluster, "
            f"at most {MAX_SEGMENT}"
        )
    if options.iterations < 0:
        raise ConfigError(f"retroinfer: iterations={options.iterations}; set it to 0 or more")
    if not 0 < options.exact <= 1 or not 0 <= options.estimated <= 1:
        raise ConfigError(
            f"retroinfer: exact={options.exact}, estimated={options.estimated}; they are shares of the clusters: "
            f"set exact above 0 and both to at most 1"
        )


def cluster_means(keys: Tensor, directions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every key's cluster by the largest inner product, and what the clusters then hold.

    keys [H, L, D], directions [H, C, D], rows [H, L, E]
    returns clusters [H, L], sizes [H, C], the members' mean rows [H, C, E] (0 of an empty cluster)
    """
    clusters = (keys @ directions.mT).argmax(-1)
    # A product with 0 and 1, not scatter_add: its sums are taken in the same order every time.
    is_member = (clusters.unsqueeze(-2) == torch.arange(directions.shape[1], device=keys.device).unsqueeze(-1)).float()
    sizes = is_member.sum(-1)
    return clusters, sizes, is_member @ rows / sizes.clamp(min=1).unsqueeze(-1)


def share(ratio: float, clusters: int) -> int:
    """How many of so many clusters a ratio means, at least 1 unless it is 0."""
    return max(1, round(ratio * clusters)) if ratio else 0


def share_of(ratio: float, clusters: Tensor) -> Tensor:
    """`share` of every row, on the device."""
    return (clusters.double() * ratio).round().int().clamp(min=1 if ratio else 0)


def valid_sizes(sizes: Tensor, num_clusters: Tensor) -> Tensor:
    """Tokens of each cluster [B, H, M] int32, 0 past a row's length."""
    return sizes.int().where(torch.arange(sizes.shape[-1], device=sizes.device) < num_clusters, 0)


def cluster_scores(query: Query, centroids: Tensor, sizes: Tensor) -> Tensor:
    """The sum over the group of the softmax over the clusters, as a logarithm [B, H, M]; -inf where one is empty."""
    scores = query.heads.float() @ centroids.float().mT * query.scaling  # [B, H, G, M]
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    is_empty = sizes == 0
    scores = scores.masked_fill(is_empty.unsqueeze(2), -torch.inf)
    return scores.log_softmax(-1).logsumexp(2).masked_fill(is_empty, -torch.inf)


def exact_tokens(sizes: Tensor, num_exact: Tensor, count: Tensor) -> Tensor:
    """How many tokens of each ranked cluster [B, H, R] are exact: all, until the clusters or the budget end.

    The cluster that the budget's `count` [B, 1, 1] cuts gives what fits.
    """
    allowed = sizes.where(torch.arange(sizes.shape[-1], device=sizes.device) < num_exact, 0)
    room = count - (allowed.cumsum(-1) - allowed)
    return room.clamp(min=0).minimum(allowed)


def next_clusters(sizes: Tensor, taken: Tensor, num_estimated: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ranks of the clusters that are estimated, and how many of their tokens are: both [B, H, width].

    They are the `num_estimated` [B, 1, 1] after those that are exact altogether; a count is 0 where a place is unused.
    """
    rest = sizes - taken
    first = ((rest == 0) & (sizes > 0)).sum(-1, keepdim=True)
    ranks = first + torch.arange(width, device=sizes.device)
    is_used = ranks < (first + num_estimated).clamp(max=sizes.shape[-1])
    ranks = ranks.clamp(max=sizes.shape[-1] - 1)
    return ranks, rest.gather(-1, ranks).where(is_used, 0)


def first_members(members: Tensor, starts: Tensor, taken: Tensor, width: int, segment: int) -> Tensor:
    """Positions [B, H, width] of the first `taken` tokens of each cluster, then -1.

    members        [B, H, N]  the tokens' places in their segment, cluster after cluster
    starts, taken  [B, H, X]  where a cluster begins in `members`, how many of its tokens are wanted
    """
    ends = taken.cumsum(-1)
    slots = torch.arange(width, device=members.device).repeat(*ends.shape[:2], 1)
    cluster = torch.searchsorted(ends, slots, right=True).clamp(max=ends.shape[-1] - 1)
    place = slots + (starts - (ends - taken)).gather(-1, cluster)
    is_used = slots < ends[..., -1:]
    place = place.where(is_used, 0)
    tokens = place // segment * segment + members.gather(-1, place)
    return tokens.where(is_used, -1).int()


def estimated_rows(codes: Codes, clusters: Tensor, counts: Tensor, group: int) -> Rows:
    """The clusters [B, H, E] as rows that stand for `counts` of their tokens each, unused where that is 0."""
    is_used = (counts > 0).unsqueeze(-1)

    def rows_of(field: Tensor) -> Tensor:
        rows = field.gather(2, clusters.unsqueeze(-1).expand(-1, -1, -1, field.shape[-1]))
        return rows.where(is_used, 0)

    bias = counts.float().log().unsqueeze(2).expand(-1, -1, group, -1)
    return Rows(rows_of(codes["centroids"]), rows_of(codes["means"]), bias)


@hookimpl
def register_retrievers(register: Register) -> None:
    register("retroinfer", RetroInfer, options=Options)
