"""CUDA kernels against their definitions: on a GPU where there is one, else in Numba's simulator (small sizes)."""

from __future__ import annotations

import pytest
import torch
from conftest_cuda import ON_GPU


@pytest.fixture(autouse=True)
def backend() -> str:
    """Overrides the CPU backends of the folder above: these tests call the kernels themselves."""
    return "cuda"


@pytest.fixture
def device() -> torch.device:
    """Where the kernels' tensors lie: the simulator takes CPU tensors."""
    return torch.device("cuda" if ON_GPU else "cpu")
