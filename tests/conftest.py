"""Settings of all tests."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before anything imports numba: CUDA kernels run in the simulator

# Where pariskv is installed, pytest finds them by itself: the fixtures that it brings for plugin authors.
pytest_plugins = ["pariskv.testing.fixtures"]

# The tensors of most tests are tiny: more threads only wait for one another.
torch.set_num_threads(1)
