"""Codes of keys: sign patterns for the vote, 4-bit coordinates and weights for the rerank."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_float, check_shape, check_subspace_dim
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.encode import naive
from pariskv_kernels.encode.naive import KeyCodes
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.srht import padded_dim

__all__ = ["KeyCodes", "encode_keys"]


def encode_keys(keys: Tensor, subspace_dim: int, seed: int | None = 42) -> KeyCodes:
    """Codes of a block of keys: `signs`, `codes`, `weights`, `counts`, described at `KeyCodes`.

    keys          [B, H, n, D] of any floating-point dtype and strides
    subspace_dim  m, 4 or 8; P = the next power of two of D, at least m; S = P / m
    seed          of the rotation; None: the keys are in their frame already (`to_frame`), D a power of two

    Bit-identical however the tokens are split into blocks. Zero keys and zero blocks get weight 0.
    Raises TypeError or ValueError naming the argument.
    Source: ParisKV (arXiv 2602.07721), section 3.1; `naive.py` is the definition.
    """
    check_float("keys", keys)
    check_shape("keys", keys, None, None, None, None)
    check_subspace_dim(subspace_dim)
    if padded_dim(keys.shape[-1]) < subspace_dim:
        raise ValueError(f"keys: wanted heads of more than {subspace_dim // 2} coordinates, got {keys.shape[-1]}")
    if seed is None and padded_dim(keys.shape[-1]) != keys.shape[-1]:
        raise ValueError(f"keys: wanted a power of two of coordinates where seed is None, got {keys.shape[-1]}")
    if is_compiled_for(keys):
        from pariskv_kernels.encode import cpu

        return cpu.encode_keys(keys, subspace_dim, seed)
    if keys.dtype != torch.float64 and is_on_gpu(keys):
        from pariskv_kernels.encode import cuda

        return cuda.encode_keys(keys, subspace_dim, seed)
    return naive.encode_keys(keys, subspace_dim, seed)
