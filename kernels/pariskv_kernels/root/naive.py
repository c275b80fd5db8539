"""The definition of `square_roots`, by eigendecomposition."""

from __future__ import annotations

import torch
from torch import Tensor


def square_roots(matrices: Tensor) -> tuple[Tensor, Tensor]:
    return matrix_powers(matrices, 0.5)


def matrix_powers(matrices: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """Symmetric positive definite matrices [N, D, D] to a power, and the inverse of that."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    tiny = torch.finfo(values.dtype).eps * values[..., -1:]
    powers = values.clamp(min=tiny).pow(exponent).unsqueeze(-2)
    return torch.matmul(vectors * powers, vectors.mT), torch.matmul(vectors / powers, vectors.mT)
