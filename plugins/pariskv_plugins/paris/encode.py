"""ParisKV's format: what it stores of keys and what it shares of a query. Section 3.1 of the paper."""

from __future__ import annotations

import torch
from pariskv_kernels.encode import encode_keys
from pariskv_kernels.srht import padded_dim, rotate_group_mean
from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.types import TOKENS, CodeField, Tensors


def fields(head_dim: int, subspace_dim: int) -> dict[str, CodeField]:
    """Where the codes lie. The vote reads one subspace after the other, the rerank one key after the other.

    signs    [B, H, S, N]      sign pattern of a subspace
    codes    [B, H, N, P / 2]  4 bits a coordinate
    weights  [B, H, N, S]      what a block's estimate is multiplied by
    counts   [B, H, S, 2^m]    keys per sign pattern
    """
    padded = padded_dim(head_dim)
    if padded < subspace_dim:
        raise ConfigError(
            f"pariskv: subspace_dim={subspace_dim} but the heads have {head_dim} coordinates; set it to 4, "
            f"or use another retriever for this model"
        )
    subspaces = padded // subspace_dim
    return {
        "signs": CodeField((subspaces, TOKENS), torch.uint8),
        "codes": CodeField((TOKENS, padded // 2), torch.uint8),
        "weights": CodeField((TOKENS, subspaces), torch.float16),
        "counts": CodeField((subspaces, 1 << subspace_dim), torch.int32, reduce="sum"),
    }


def encode_block(keys: Tensor, subspace_dim: int, seed: int) -> Tensors:
    """The fields of a block of keys [R, H, n, D]."""
    return encode_keys(keys, subspace_dim, seed)._asdict()


def encode_heads(heads: Tensor, seed: int) -> Tensors:
    """The mean over the group of heads [B, H, G, D], rotated: [B, H, P] float32, not normalised.

    The paper normalises it; a factor changes neither the ranking of patterns nor that of keys.
    """
    return {"rotated": rotate_group_mean(heads, seed)}
