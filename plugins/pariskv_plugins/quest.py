"""Quest (arXiv 2406.10774): pages of tokens, the most promising of them by an upper bound of their scores.

Of every page and coordinate the smallest and the largest key are kept. For a query q no token of page p scores more
than

    UB_p(q) = sum over d of max(q_d min_pd, q_d max_pd)

(section 3.3), and the pages with the highest bounds are attended: budget / page_size of them per query head. New
tokens are indexed exactly, page by page; nothing goes stale.

A group of query heads shares its keys, by the option `combine`:

    per_query_head  heads choose apart, as published; the union is attended, each head to its own pages (default)
    the others      one choice per key/value head: the names and the meaning of `exact`, on pages instead of tokens

The paper always keeps the page being written: here the newest tokens are in the ring, which is always attended. It
keeps the first two layers dense: `layers: {"0-1": {retriever: dense}}`, as in configs/quest.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pariskv_kernels.select import select_by_scores
from torch import Tensor
from torch.nn.functional import pad

from pariskv.errors import ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Query, Selection, Tensors
from pariskv_plugins.exact import COMBINE, PER_QUERY_HEAD, choose_per_head

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    page_size: int = 16  # tokens that are bounded and selected together
    combine: str = PER_QUERY_HEAD  # per_query_head, max_logit, sum_softmax, max_softmax, mean_query


class Quest(Retriever):
    """Only whole pages, as many as the budget holds; of a budget below one page, the best page's first tokens.

    With per_query_head every head takes as many, and the selection is G times as wide: no overflow.
    """

    graph_safe = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        size, combine, names = self.options.page_size, self.options.combine, (PER_QUERY_HEAD, *COMBINE)
        if type(size) is not int or size < 1:
            raise ConfigError(f"quest: page_size={size!r}; set it to an integer from 1")
        if combine not in names:
            raise ConfigError(f"quest: combine={combine!r}; set it to one of {', '.join(names)}")
        self.block = size
        self.format = f"quest-p{size}"
        self.selects_per_query_head = combine == PER_QUERY_HEAD

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        """bounds [B, H, pages, 2, D]: the smallest, then the largest key in each coordinate."""
        bounds = CodeField((TOKENS, 2, layer.head_dim), layer.dtype, tokens_per_entry=self.options.page_size)
        return Codes.empty(layer, capacity, bounds=bounds)

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        rows, heads, _, dim = keys.shape
        pages = keys.reshape(rows, heads, -1, self.options.page_size, dim)
        return {"bounds": torch.stack((pages.amin(3), pages.amax(3)), dim=3)}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        scores, pages = self.upper_bounds(query, codes)
        width = max(budget.width // self.options.page_size, 1)
        count = (budget.count // self.options.page_size).clamp(min=1)
        if self.selects_per_query_head:
            chosen = choose_per_head(Selection(pages), scores, width, count)
            return self.tokens_of(chosen, budget, scores.shape[2] * budget.width)
        combined = COMBINE[self.options.combine](scores)
        return self.tokens_of(Selection(select_by_scores(combined, pages, width, count)), budget, budget.width)

    def upper_bounds(self, query: Query, codes: Codes) -> tuple[Tensor, Tensor]:
        """What no token of a page scores more than [B, H, G or 1, P], float32, and the pages' numbers [B, H, P].

        Past a row's length the bounds are -inf and the numbers -1.
        """
        heads, bounds = query.heads.float(), codes["bounds"]
        if self.options.combine == "mean_query":
            heads = heads.mean(2, keepdim=True)
        scores = least_and_most(heads, bounds) * query.scaling
        if query.softcap is not None:
            scores = query.softcap * torch.tanh(scores / query.softcap)
        numbers = torch.arange(bounds.shape[2], dtype=torch.int32, device=bounds.device)
        lengths = (codes.length // self.options.page_size).view(-1, 1, 1)
        pages = torch.where(numbers < lengths, numbers, -1)  # [B, 1, P]
        scores = scores.masked_fill((pages < 0).unsqueeze(2), -torch.inf)
        return scores, pages.expand(-1, bounds.shape[1], -1)

    def tokens_of(self, pages: Selection, budget: Budget, slots: int) -> Selection:
        """The tokens of the pages, each with its page's bias, in a selection of `slots` slots."""
        taken = min(self.options.page_size, budget.width)
        offsets = torch.arange(taken, dtype=torch.int32, device=budget.count.device)
        used = (pages.indices >= 0).unsqueeze(-1) & (offsets < budget.count.view(-1, 1, 1, 1))
        tokens = pages.indices.unsqueeze(-1) * self.options.page_size + offsets
        indices = torch.where(used, tokens, -1).flatten(2)
        indices = pad(indices, (0, slots - indices.shape[-1]), value=-1)
        if pages.bias is None:
            return Selection(indices)
        bias = pages.bias.repeat_interleave(taken, dim=-1)
        bias = pad(bias, (0, slots - bias.shape[-1]), value=-torch.inf)
        return Selection(indices, bias.masked_fill((indices < 0).unsqueeze(2), -torch.inf))


def least_and_most(heads: Tensor, bounds: Tensor) -> Tensor:
    """UB of heads [B, H, G, D] in float32 and bounds [B, H, P, 2, D]: [B, H, G, P] in float32.

    A positive coordinate of the query meets the largest key, a negative one the smallest: one product.
    """
    queries, flat = torch.cat((heads.clamp(max=0), heads.clamp(min=0)), dim=-1), bounds.flatten(3)
    if flat.is_cuda and flat.dtype in HALVES:
        # Summed in float32 without a copy of the bounds in float32, which would be most of the step's traffic.
        product = torch.bmm(queries.flatten(0, 1).to(flat.dtype), flat.flatten(0, 1).mT, out_dtype=torch.float32)
        return product.view(*queries.shape[:3], flat.shape[2])
    return queries @ flat.float().mT


@hookimpl
def register_retrievers(register: Register) -> None:
    register("quest", Quest, options=Options)
