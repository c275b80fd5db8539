"""The definition of `encode_keys`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pariskv_kernels.quantizer import level_table, lloyd_max
from pariskv_kernels.srht import rotate
from pariskv_kernels.tree import tree_sum

TOKENS_AT_ONCE = 4096
LARGEST = torch.finfo(torch.float16).max


class KeyCodes(NamedTuple):
    """What a block of keys [B, H, n, D] is stored as, z being the rotated key.

    signs    [B, H, S, n]     uint8, bit j set where coordinate j of the subspace is negative
    codes    [B, H, n, P / 2] uint8, coordinate 2i in the low and 2i + 1 in the high four bits:
                              bits 0-2 the magnitude of z_j / ||z_b||, bit 3 set where z_j is negative
    weights  [B, H, n, S]     float16, ||z_b|| / sqrt(P) / alpha_b, alpha_b = sum of level x |u| over the block
    counts   [B, H, S, 2^m]   int32, keys per sign pattern
    """

    signs: Tensor
    codes: Tensor
    weights: Tensor
    counts: Tensor


def encode_keys(keys: Tensor, subspace_dim: int, seed: int | None) -> KeyCodes:
    """Codes of keys [B, H, n, D], some tokens at a time, so that a long prompt needs little memory."""
    parts = [encode_block(block, subspace_dim, seed) for block in torch.split(keys, TOKENS_AT_ONCE, dim=2)]
    if len(parts) == 1:
        return parts[0]
    signs, codes, weights, counts = zip(*parts, strict=True)
    return KeyCodes(torch.cat(signs, 3), torch.cat(codes, 2), torch.cat(weights, 2), torch.stack(counts).sum(0).int())


def encode_block(keys: Tensor, subspace_dim: int, seed: int | None) -> KeyCodes:
    """Codes of keys [B, H, n, D]. Everything is elementwise or a `tree_sum`: see there."""
    z = (keys.float() if seed is None else rotate(keys, seed)).transpose(-1, -2)
    batch, heads, padded, tokens = z.shape
    z = z.reshape(batch, heads, padded // subspace_dim, subspace_dim, tokens)
    negative = (z < 0).to(torch.uint8)
    bits = torch.arange(subspace_dim, dtype=torch.uint8, device=keys.device).unsqueeze(1)
    signs = tree_sum(negative << bits, dim=3)

    # By way of float64, since a vector library's float32 root may be off by a bit, and not on every machine alike.
    radius = tree_sum(z * z, dim=3).double().sqrt().float()
    u = z.abs() / radius.unsqueeze(3)
    magnitude = torch.zeros_like(negative)
    for threshold in lloyd_max(subspace_dim).thresholds:
        magnitude += u >= threshold
    levels = level_table(subspace_dim, keys.device).index_select(0, magnitude.flatten().int()).view_as(u)
    alpha = tree_sum(levels * u, dim=3)
    # A zero block is 0 / 0 here and gets the weight 0.
    weights = (radius * (1 / math.sqrt(padded)) / alpha).nan_to_num(nan=0.0).clamp(max=LARGEST).half()

    nibbles = (magnitude | negative << 3).flatten(2, 3)  # [B, H, P, n]
    codes = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4
    return KeyCodes(
        signs,
        codes.transpose(2, 3).contiguous(),
        weights.transpose(2, 3).contiguous(),
        count_patterns(signs, 1 << subspace_dim),
    )


def count_patterns(signs: Tensor, patterns: int) -> Tensor:
    """How many keys have each sign pattern: signs [B, H, S, n] to int32 [B, H, S, patterns]."""
    counts = torch.zeros(*signs.shape[:3], patterns, dtype=torch.int32, device=signs.device)
    return counts.scatter_add_(-1, signs.long(), counts.new_ones(()).expand(signs.shape))
