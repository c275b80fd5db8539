"""The definition of `rotate`."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache
def random_signs(dim: int, seed: int, device: torch.device) -> Tensor:
    """Signs [dim] float32, -1 or 1, drawn on the CPU so that every device has the same."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (dim,), generator=generator).float() * 2 - 1).to(device)


@lru_cache
def plus_minus(device: torch.device) -> Tensor:
    return torch.tensor([[1.0], [-1.0]], device=device)


def rotate(x: Tensor, padded: int, seed: int) -> Tensor:
    """H (signs * x), H the Hadamard matrix of +-1: [..., D] to [..., padded]."""
    signed = x.float() * random_signs(x.shape[-1], seed, x.device)
    if padded > x.shape[-1]:
        signed = F.pad(signed, (0, padded - x.shape[-1]))
    # Coordinates before rows: every butterfly adds whole rows of tokens.
    z = signed.unsqueeze(-2).transpose(-1, -2) if x.dim() == 1 else signed.transpose(-1, -2)
    z = z.contiguous()  # [..., P, n]
    halves = (*z.shape[:-2], 2, padded // 2, 1, z.shape[-1])
    for _ in range(padded.bit_length() - 1):
        low, high = z.reshape(halves).unbind(-4)
        # low + high and low - high side by side: products with +-1 are exact, fused or not.
        z = torch.addcmul(low, high, plus_minus(x.device))  # [..., P / 2, 2, n]
    z = z.reshape(*halves[:-4], padded, halves[-1])
    return z.transpose(-1, -2).reshape(*x.shape[:-1], padded)


@lru_cache
def rotation_matrix(dim: int, padded: int, seed: int, device: torch.device) -> Tensor:
    """`rotate` as a matrix [D, P], for the few rows of a query."""
    return rotate(torch.eye(dim, device=device), padded, seed).contiguous()


def rotate_few(x: Tensor, padded: int, seed: int) -> Tensor:
    """`rotate` within rounding: one small product for each vector [N, D], the same in every batch."""
    matrix = rotation_matrix(x.shape[-1], padded, seed, x.device)
    return torch.bmm(x.unsqueeze(1), matrix.expand(x.shape[0], -1, -1)).squeeze(1)


def rotate_group_mean(heads: Tensor, padded: int, seed: int) -> Tensor:
    """Mean over G of heads [B, H, G, D], rotated: [B, H, padded]."""
    # Added one by one: a reduction may round differently in another batch size.
    mean = sum(heads.float().unbind(2)[1:], heads[:, :, 0].float()) / heads.shape[2]
    return rotate_few(mean.flatten(0, 1), padded, seed).view(*mean.shape[:2], padded)
