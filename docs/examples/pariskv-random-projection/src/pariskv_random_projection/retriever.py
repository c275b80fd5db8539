"""The retriever `random-projection`: keys projected onto a few random directions rank the tokens.

Letters: B batch rows, H key/value heads, G query heads per key/value head, D head size,
N tokens that fit into a row's zone, C candidates, m directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from pariskv import (
    TOKENS,
    Budget,
    CodeField,
    Codes,
    LayerInfo,
    Query,
    Retriever,
    Selection,
    hookimpl,
)
from pariskv.errors import ConfigError
from pariskv.types import Tensors
from torch import Tensor

LARGEST = 127


@dataclass(frozen=True)
class Options:
    directions: int = 32  # m, the numbers that are kept of a key


class RandomProjection(Retriever):
    """Ranks all tokens by keys that are projected onto m random directions, a byte each."""

    graph_safe = True
    combine = "sum_softmax"

    def __init__(self, options: Options | None = None) -> None:
        self.directions = (options or Options()).directions
        if self.directions < 1:
            raise ConfigError(f"random-projection: directions={self.directions}, wanted 1 or more")
        self.format = f"random-projection-{self.directions}"

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        """What is kept for each token: m bytes, and a scale of 4."""
        return Codes.empty(
            layer,
            capacity,
            levels=CodeField((TOKENS, self.directions), torch.int8),
            scale=CodeField((TOKENS,), torch.float32),
        )

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        """Of keys [R, H, n, D]: element by element, so that any split gives the same bits."""
        exact = project(keys.float(), self.directions)
        scale = exact.abs().amax(-1) / LARGEST
        levels = exact / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        return {"levels": levels.round().to(torch.int8), "scale": scale}

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        """Of the queries [B, H, G, D] the same projections, once a step."""
        return {"projected": project(heads.float(), self.directions)}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        """The `budget.count` best tokens of each row; the rest of the C slots is -1."""
        assert query.encoded is not None
        scale = codes["scale"].unsqueeze(2) * query.scaling
        scores = query.encoded["projected"] @ codes["levels"].float().mT * scale  # [B, H, G, N]
        position = torch.arange(scores.shape[-1], device=scores.device)
        # Behind a row's length the codes may hold anything, NaN too: choose, never multiply.
        is_token = (position < codes.length.unsqueeze(1)).view(-1, 1, 1, len(position))
        ranking = scores.where(is_token, -torch.inf).softmax(-1).sum(2)  # [B, H, N]
        ranking = ranking.where(is_token.squeeze(1), -torch.inf)
        best = ranking.topk(budget.width).indices
        is_used = position[: budget.width] < budget.count.view(-1, 1, 1)
        return Selection(best.where(is_used, -1).int())


def project(vectors: Tensor, directions: int) -> Tensor:
    """Inner products [..., m] of vectors [..., D] with random signs, over the root of m.

    They keep inner products in expectation (Achlioptas, Database-friendly random projections,
    2003). A matrix product may round otherwise for another number of vectors; sums in a fixed
    order do not.
    """
    signs = random_signs(vectors.shape[-1], directions, vectors.device)
    total = vectors[..., :1] * signs[0]
    for coordinate in range(1, vectors.shape[-1]):
        total = total + vectors[..., coordinate : coordinate + 1] * signs[coordinate]
    return total / math.sqrt(directions)


@cache
def random_signs(head_dim: int, directions: int, device: torch.device) -> Tensor:
    """[D, m] of -1 and 1: always the same, so that saved codes stay readable."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (head_dim, directions), generator=generator)
    return (2.0 * bits - 1.0).to(device)
