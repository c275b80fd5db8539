"""An attention over other rows that is merged in at the end, and may be under way until then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape

Other = Callable[[], tuple[Tensor, Tensor]]
"""Returns out [B, H, G, D] and log-sum-exp [B, H, G]; asked once the own rows have been attended to."""


def asked(other: Other, heads: Tensor) -> tuple[Tensor, Tensor]:
    """What it found; TypeError or ValueError naming what is not as the heads [B, H, G, D] want it."""
    out, lse = other()
    for name, tensor, shape in (("other's out", out, heads.shape), ("other's log-sum-exp", lse, heads.shape[:3])):
        check_dtype(name, tensor, torch.promote_types(heads.dtype, torch.float32))
        check_shape(name, tensor, *shape)
    return out, lse
