"""What ParisKV stores of a key, and the checks that both of its versions share. Section 3.1 of the paper."""

from __future__ import annotations

import torch
from pariskv_kernels.srht import padded_dim
from torch import Tensor

from pariskv.errors import ConfigError, PluginContractError
from pariskv.types import TOKENS, CodeField, Query

SUBSPACE_DIMS = (4, 8)
MAX_SEED = 2**63


def fields(name: str, head_dim: int, subspace_dim: int) -> dict[str, CodeField]:
    """Where the codes lie. The vote reads one subspace after the other, the rerank one key after the other.

    signs    [B, H, S, N]      sign pattern of a subspace
    codes    [B, H, N, P / 2]  4 bits a coordinate
    weights  [B, H, N, S]      what a block's estimate is multiplied by
    counts   [B, H, S, 2^m]    keys per sign pattern
    """
    padded = padded_dim(head_dim)
    if padded < subspace_dim:
        raise ConfigError(
            f"{name}: subspace_dim={subspace_dim} but the heads have {head_dim} coordinates; set it to 4, "
            f"or use another retriever for this model"
        )
    subspaces = padded // subspace_dim
    return {
        "signs": CodeField((subspaces, TOKENS), torch.uint8),
        "codes": CodeField((TOKENS, padded // 2), torch.uint8, read="candidates"),
        "weights": CodeField((TOKENS, subspaces), torch.float16, read="candidates"),
        "counts": CodeField((subspaces, 1 << subspace_dim), torch.int32, reduce="sum"),
    }


def encoded(query: Query, name: str) -> Tensor:
    """What `encode_query` made of the step's queries."""
    if query.encoded is None or name not in query.encoded:
        raise PluginContractError(
            f"pariskv: query.encoded has no {name!r}; pass what encode_query of the codes' producer returned"
        )
    return query.encoded[name]


def check_options(name: str, subspace_dim: int, seed: int) -> None:
    """Raise ConfigError for values that mean nothing."""
    if type(subspace_dim) is not int or subspace_dim not in SUBSPACE_DIMS:
        raise ConfigError(f"{name}: subspace_dim={subspace_dim!r}; set it to 4 or 8")
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise ConfigError(f"{name}: seed={seed!r}; set it to an integer from 0 to 2**63 - 1")
