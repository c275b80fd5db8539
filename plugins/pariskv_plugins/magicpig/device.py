"""MagicPIG's placement device: keys and hashes beside the model, sampled rows through `fetch`, weights as a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pariskv_kernels.lsh import COLLISIONS, count_collisions, log_weights
from pariskv_kernels.select import select_by_scores
from torch import Tensor

from pariskv.types import TOKENS, Budget, CodeField, Codes, LayerInfo, Query, Selection, Tensors
from pariskv_plugins.magicpig.sample import SampledCodes, count_sample, queries_of, rule_of

if TYPE_CHECKING:
    from pariskv_plugins.magicpig import Options


def allocate(layer: LayerInfo, capacity: int, options: Options) -> Codes:
    """hashes [B, H, L, N]; keys [B, H, N, D] and the centred keys' norms [B, H, N], for the cosine of a weight."""
    return SampledCodes.empty(
        layer,
        capacity,
        hashes=CodeField((options.tables, TOKENS), torch.int16),
        keys=CodeField((TOKENS, layer.head_dim), layer.dtype, read="part"),
        norms=CodeField((TOKENS,), torch.float32, read="part"),
    )


def encode(keys: Tensor, norms: Tensor, hashes: Tensor) -> Tensors:
    return {"hashes": hashes, "keys": keys, "norms": norms}


def select_sample(query: Query, codes: Codes, budget: Budget, options: Options) -> Selection:
    """The union of the query heads' samples: of more than G x budget.count the ones with the most collisions.

    The bias is - log(u + 1e-4) for the heads that sampled a token, -inf for the others.
    """
    queries = queries_of(query)
    group = query.heads.shape[2]
    collisions = count_collisions(codes["hashes"], queries.hashes, codes.length)  # [B, H, G, N]
    most = collisions.amax(2)
    positions = torch.arange(most.shape[-1], dtype=torch.int32, device=most.device)
    sampled = torch.where(most >= COLLISIONS, positions, -1)
    indices = select_by_scores(most.float(), sampled, group * budget.width, group * budget.count)
    is_kept = indices >= 0
    count_sample(codes, (sampled >= 0).sum(-1), is_kept.sum(-1))

    slots = indices.clamp(min=0).long()
    keys = codes["keys"].gather(2, slots.unsqueeze(-1).expand(-1, -1, -1, query.heads.shape[-1])).float()
    weights = log_weights(queries.heads @ keys.mT, codes["norms"].gather(-1, slots), queries, rule_of(query, options))
    own = collisions.gather(-1, slots.unsqueeze(2).expand(-1, -1, group, -1))
    return Selection(indices, weights.masked_fill((own < COLLISIONS) | ~is_kept.unsqueeze(2), -torch.inf))
