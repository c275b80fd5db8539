"""Settings of all tests."""

from __future__ import annotations

import torch

# The tensors of most tests are tiny: more threads only wait for one another.
torch.set_num_threads(1)
