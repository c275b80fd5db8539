"""`encode_keys` compiled for a CPU: every float32 operation in the order of `naive.py`, so the bits are its bits."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.encode.naive import LARGEST, KeyCodes
from pariskv_kernels.quantizer import lloyd_max
from pariskv_kernels.srht import padded_dim
from pariskv_kernels.srht.naive import random_signs

TILE = 32  # tokens side by side, so that a butterfly adds vectors


def encode_keys(keys: Tensor, subspace_dim: int, seed: int | None) -> KeyCodes:
    batch, heads, tokens, dim = keys.shape
    padded = padded_dim(dim)
    subspaces = padded // subspace_dim
    signs = torch.empty(batch, heads, subspaces, tokens, dtype=torch.uint8)
    codes = torch.empty(batch, heads, tokens, padded // 2, dtype=torch.uint8)
    weights = torch.empty(batch, heads, tokens, subspaces)
    counts = torch.zeros(batch, heads, subspaces, 1 << subspace_dim, dtype=torch.int32)
    _encode(
        keys.detach().float().numpy(),
        np.empty(0, np.float32) if seed is None else random_signs(dim, seed, keys.device).numpy(),
        tuple(np.float32(threshold) for threshold in lloyd_max(subspace_dim).thresholds),
        tuple(np.float32(level) for level in lloyd_max(subspace_dim).levels),
        np.float32(1 / math.sqrt(padded)),
        signs.numpy(),
        codes.numpy(),
        weights.numpy(),
        counts.numpy(),
    )
    return KeyCodes(signs, codes, weights.half(), counts)


@njit(cache=True, nogil=True, error_model="numpy")
def _rotate(keys, flips, z):  # type: ignore[no-untyped-def]
    """The rotation of `srht`: keys [T, D] to z [P, T], by butterflies in place; without signs, z are the keys."""
    tokens, dim = keys.shape
    padded = z.shape[0]
    if flips.shape[0] == 0:
        for t in range(tokens):
            for d in range(dim):
                z[d, t] = keys[t, d]
        return
    z[dim:] = 0
    for t in range(tokens):
        for d in range(dim):
            z[d, t] = keys[t, d] * flips[d]
    half = padded // 2
    while half:
        for start in range(0, padded, 2 * half):
            for d in range(start, start + half):
                for t in range(TILE):
                    low, high = z[d, t], z[d + half, t]
                    z[d, t] = low + high
                    z[d + half, t] = low - high
        half //= 2


@njit(cache=True, nogil=True, error_model="numpy")
def _tree_sum(x, terms):  # type: ignore[no-untyped-def]
    """`tree_sum` over the first `terms` rows of x [m, T], into the first."""
    while terms > 1:
        terms //= 2
        for j in range(terms):
            for t in range(TILE):
                x[j, t] += x[j + terms, t]


@njit(cache=True, nogil=True, error_model="numpy")
def _quantize(x, radius, thresholds, levels, magnitudes, products):  # type: ignore[no-untyped-def]
    """The magnitude of each u = |x| / radius, and its level times u. No table: a lookup would not be a vector."""
    for t in range(TILE):
        u = abs(x[t]) / radius[t]
        magnitude, level = np.int32(0), levels[0]
        for i in range(7):
            above = u >= thresholds[i]
            magnitude += np.int32(above)
            level = levels[i + 1] if above else level
        magnitudes[t] = magnitude
        products[t] = level * u


@njit(cache=True, nogil=True, error_model="numpy")
def _encode(keys, flips, thresholds, levels, scale, signs, codes, weights, counts):  # type: ignore[no-untyped-def]
    batch, heads, tokens, _ = keys.shape
    subspaces = signs.shape[2]
    m = 2 * codes.shape[3] // subspaces
    z = np.zeros((m * subspaces, TILE), np.float32)
    squares, products = np.empty((m, TILE), np.float32), np.empty((m, TILE), np.float32)
    radius, nibbles = np.empty(TILE, np.float32), np.empty((m, TILE), np.uint8)
    pattern = np.empty(TILE, np.uint8)
    for b in range(batch):
        for h in range(heads):
            for first in range(0, tokens, TILE):
                size = min(TILE, tokens - first)
                _rotate(keys[b, h, first : first + size], flips, z)
                for s in range(subspaces):
                    block = z[s * m : (s + 1) * m]
                    for j in range(m):
                        for t in range(TILE):
                            squares[j, t] = block[j, t] * block[j, t]
                    _tree_sum(squares, m)
                    for t in range(TILE):
                        radius[t] = np.sqrt(squares[0, t])
                    pattern[:] = 0
                    for j in range(m):
                        _quantize(block[j], radius, thresholds, levels, nibbles[j], products[j])
                        for t in range(TILE):
                            negative = np.uint8(block[j, t] < 0)
                            nibbles[j, t] |= negative << 3
                            pattern[t] |= negative << j
                    _tree_sum(products, m)
                    for t in range(size):
                        weight = radius[t] * scale / products[0, t]
                        n = first + t
                        # A zero block is 0 / 0 here and gets the weight 0.
                        weights[b, h, n, s] = 0 if np.isnan(weight) else min(weight, LARGEST)
                        signs[b, h, s, n] = pattern[t]
                        counts[b, h, s, pattern[t]] += 1
                        for j in range(0, m, 2):
                            codes[b, h, n, (s * m + j) // 2] = nibbles[j, t] | nibbles[j + 1, t] << 4
