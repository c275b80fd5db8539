"""`gather_rows` compiled for a CPU."""

from __future__ import annotations

import torch
from numba import njit
from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(rows: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    valid = torch.empty(indices.shape, dtype=torch.bool)
    bits = BITS[rows.element_size()]
    _copy_rows(rows.view(bits).numpy(), indices.numpy(), out.view(bits).numpy(), valid.numpy())
    return valid


@njit(cache=True, nogil=True)
def _copy_rows(rows, indices, out, valid):  # type: ignore[no-untyped-def]
    batch, heads, num_slots = indices.shape
    for b in range(batch):
        for h in range(heads):
            for k in range(num_slots):
                n = indices[b, h, k]
                valid[b, h, k] = n >= 0
                for part in range(2):
                    for d in range(rows.shape[4]):
                        out[b, h, k, part, d] = rows[b, h, n, part, d] if n >= 0 else 0
