"""For the tests of CUDA kernels: a mark for sizes that the simulator is too slow for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()


def needs_gpu(test: Any) -> Any:
    """Run on a GPU only."""
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")(test))
