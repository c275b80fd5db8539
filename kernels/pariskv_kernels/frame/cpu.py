"""`to_frame` compiled for a CPU: every float32 operation in the order of `naive.py`, so the bits are its bits."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pariskv_kernels.frame.naive import Framed, inverse, norm_thresholds


def to_frame(keys: Tensor, centre: Tensor, matrix: Tensor, power: Tensor) -> Framed:
    batch, heads, tokens, _ = keys.shape
    z = torch.empty(batch, heads, tokens, matrix.shape[3])
    norms = torch.empty(batch, heads, tokens, dtype=torch.uint8)
    _to_frame(
        keys.detach().float().numpy(),
        centre.numpy(),
        matrix.contiguous().numpy(),
        inverse(power).numpy(),
        norm_thresholds(keys.device).numpy(),
        z.numpy(),
        norms.numpy(),
    )
    return Framed(z, norms)


@njit(cache=True, nogil=True, error_model="numpy")
def _to_frame(keys, centre, matrix, inverse_power, thresholds, z, norms):  # type: ignore[no-untyped-def]
    batch, heads, tokens, dim = keys.shape
    padded = z.shape[3]
    squares = np.empty(padded, np.float32)
    for b in range(batch):
        for h in range(heads):
            rows, middle = matrix[b, h], centre[b, h]
            for n in range(tokens):
                out = z[b, h, n]
                out[:] = 0
                for d in range(dim):
                    x = keys[b, h, n, d] - middle[d]
                    for p in range(padded):
                        out[p] += x * rows[d, p]
                for p in range(padded):
                    squares[p] = out[p] * out[p]
                terms = padded
                while terms > 1:
                    terms //= 2
                    for p in range(terms):
                        squares[p] += squares[p + terms]
                norms[b, h, n] = np.searchsorted(thresholds, squares[0] * inverse_power[b, h], side="right")
