"""Whether a call goes to a kernel's `cpu.py`: compiled by Numba where that is installed (extra `[cpu]`).

The compiled loops give what `naive.py` gives, without dispatching some two hundred operations on one
step's small tensors.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

from torch import Tensor

SWITCH = "PARISKV_NUMBA"
"""Environment variable; 0 keeps CPU tensors on the PyTorch definitions."""


@lru_cache
def has_numba() -> bool:
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("numba") is not None


def is_compiled_for(*tensors: Tensor) -> bool:
    """All tensors are in host memory and Numba is there."""
    return has_numba() and all(tensor.device.type == "cpu" for tensor in tensors)
