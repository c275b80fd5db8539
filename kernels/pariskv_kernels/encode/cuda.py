"""`encode_keys` on a GPU, to the bit what `naive.py` gives: no product is fused into an addition."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import product, to_float
from pariskv_kernels.encode.naive import LARGEST, KeyCodes
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.quantizer import lloyd_max
from pariskv_kernels.specialise import static, template
from pariskv_kernels.srht import padded_dim
from pariskv_kernels.srht.naive import random_signs

WORDS = {4: torch.uint16, 8: torch.uint32}
"""One subspace's codes as one integer."""


def encode_keys(keys: Tensor, subspace_dim: int, seed: int | None, threads: int = 128, tile: int = 16) -> KeyCodes:
    batch, heads, tokens, dim = keys.shape
    padded, device = padded_dim(dim), keys.device
    subspaces = padded // subspace_dim
    signs = torch.empty(batch, heads, subspaces, tokens, dtype=torch.uint8, device=device)
    codes = torch.empty(batch, heads, tokens, padded // 2, dtype=torch.uint8, device=device)
    weights = torch.empty(batch, heads, tokens, subspaces, device=device)
    counts = torch.zeros(batch, heads, subspaces, 1 << subspace_dim, dtype=torch.int32, device=device)
    kernel = encode(PADDED=padded, M=subspace_dim, TILE=tile, ROTATE=seed is not None, load=to_float(keys.dtype))
    launch(
        kernel,
        (blocks_for(tokens, tile), heads, batch),
        threads,
        keys,
        random_signs(dim, 0 if seed is None else seed, device),
        _quantizer(subspace_dim, device),
        np.float32(1 / math.sqrt(padded)),
        signs,
        codes.view(WORDS[subspace_dim]),
        weights,
        counts,
    )
    return KeyCodes(signs, codes, weights.half(), counts)


@lru_cache
def _quantizer(subspace_dim: int, device: torch.device) -> Tensor:
    """The 8 levels, then the 7 thresholds."""
    quantizer = lloyd_max(subspace_dim)
    return torch.tensor((*quantizer.levels, *quantizer.thresholds), dtype=torch.float32, device=device)


@template
def encode(keys, flips, quantizer, scale, signs, codes, weights, counts):
    """A block rotates a tile of tokens in shared memory; then a thread encodes one subspace of one token."""
    z = cuda.shared.array(PADDED * TILE, np.float32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    first, h, b = cuda.blockIdx.x * TILE, cuda.blockIdx.y, cuda.blockIdx.z
    tokens, dim = keys.shape[2], keys.shape[3]
    for i in range(thread, PADDED * TILE, threads):
        t, d = i // PADDED, i % PADDED
        inside = d < dim and first + t < tokens
        z[i] = load(keys[b, h, first + t, d]) if inside else np.float32(0)
        if ROTATE:
            z[i] = z[i] * flips[d] if inside else np.float32(0)
    half = PADDED // 2 if ROTATE else 0
    while half > 0:
        cuda.syncthreads()
        for i in range(thread, PADDED * TILE // 2, threads):
            low = i // half * 2 * half + i % half
            one, other = z[low], z[low + half]
            z[low], z[low + half] = one + other, one - other
        half //= 2
    cuda.syncthreads()
    for i in range(thread, PADDED // M * TILE, threads):
        t, s = i % TILE, i // TILE
        n = first + t
        if n < tokens:
            start = t * PADDED + s * M
            for j in static(M):
                x[j] = z[start + j]
                sums[j] = product(x[j], x[j])
            if M == 8:
                for j in static(4):
                    sums[j] = sums[j] + sums[j + 4]
            radius = np.float32(math.sqrt((sums[0] + sums[2]) + (sums[1] + sums[3])))
            word, pattern = 0, 0
            for j in static(M):
                u = abs(x[j]) / radius
                magnitude = 0
                for k in range(8, 15):
                    magnitude += u >= quantizer[k]
                negative = int(x[j] < 0)
                word |= (magnitude | negative << 3) << (4 * j)
                pattern |= negative << j
                sums[j] = product(quantizer[magnitude], u)
            if M == 8:
                for j in static(4):
                    sums[j] = sums[j] + sums[j + 4]
            weight = product(radius, scale) / ((sums[0] + sums[2]) + (sums[1] + sums[3]))
            if weight != weight:  # a zero block: 0 / 0
                weight = np.float32(0)
            weights[b, h, n, s] = min(weight, np.float32(LARGEST))
            signs[b, h, s, n] = pattern
            codes[b, h, n, s] = word
            cuda.atomic.add(counts, (b, h, s, pattern), 1)
