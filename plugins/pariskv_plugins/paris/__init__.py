"""ParisKV (arXiv 2602.07721), the default retriever: START READING HERE.

encode.py   keys to sign patterns, 4-bit codes, weights and pattern counts; queries to a rotated mean
coarse.py   sign patterns vote for candidates
rerank.py   codes estimate the candidates' inner products
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import Budget, Codes, LayerInfo, Query, Selection, Tensors
from pariskv_plugins.paris.coarse import vote_for_candidates
from pariskv_plugins.paris.encode import encode_block, encode_heads, fields
from pariskv_plugins.paris.rerank import best_candidates

SUBSPACE_DIMS = (4, 8)
MAX_SEED = 2**63


@dataclass(frozen=True)
class Options:
    subspace_dim: int = 8  # coordinates per subspace, m: 4 or 8
    seed: int = 42  # of the rotation's random signs


class ParisKV(Retriever):
    """Sign patterns propose, 4-bit codes decide. Training-free: nothing to fit, nothing goes stale."""

    graph_safe = True
    combine = "mean_query"

    def __init__(self, options: Options | None = None) -> None:
        options = options or Options()
        if type(options.subspace_dim) is not int or options.subspace_dim not in SUBSPACE_DIMS:
            raise ConfigError(f"pariskv: subspace_dim={options.subspace_dim!r}; set it to 4 or 8")
        if type(options.seed) is not int or not 0 <= options.seed < MAX_SEED:
            raise ConfigError(f"pariskv: seed={options.seed!r}; set it to an integer from 0 to 2**63 - 1")
        self.options = options
        self.format = f"pariskv-m{options.subspace_dim}"

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity, **fields(layer.head_dim, self.options.subspace_dim))

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return encode_block(keys, self.options.subspace_dim, self.options.seed)

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        return encode_heads(heads, self.options.seed)

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        return vote_for_candidates(query, codes, budget)

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        return best_candidates(query, selection, codes, top_k)


@hookimpl
def register_retrievers(register: Register) -> None:
    register("pariskv", ParisKV, options=Options)
