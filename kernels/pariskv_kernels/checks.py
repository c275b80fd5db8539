"""Argument checks of the kernels: every message starts with the argument that is wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def check_dtype(name: str, tensor: Tensor, *wanted: torch.dtype) -> None:
    """Raises TypeError unless the tensor has one of the wanted dtypes."""
    if tensor.dtype not in wanted:
        raise TypeError(f"{name}: wanted dtype {' or '.join(map(str, wanted))}, got {tensor.dtype}")


def check_float(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless the tensor is of a floating-point dtype."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: wanted a floating-point dtype, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, *wanted: int | None) -> None:
    """Raises ValueError unless the shape is as wanted, None standing for any size."""
    shape = tuple(tensor.shape)
    if len(shape) != len(wanted) or any(want not in (None, size) for want, size in zip(wanted, shape, strict=True)):
        sizes = ", ".join("*" if want is None else str(want) for want in wanted)
        raise ValueError(f"{name}: wanted shape [{sizes}], got {list(shape)}")


def check_subspace_dim(subspace_dim: int) -> None:
    """Raises ValueError for a subspace size that has no codes."""
    if subspace_dim not in (4, 8):
        raise ValueError(f"subspace_dim: wanted 4 or 8, got {subspace_dim!r}")
