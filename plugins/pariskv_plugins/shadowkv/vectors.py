"""Vectors in whatever store keeps rows: the values that ShadowKV fetches, the keys that it does not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pariskv.types import LayerInfo, Selection
from pariskv_plugins.resident import Resident
from pariskv_plugins.uva import Uva


class Vectors:
    """One vector a token, in a store of rows: a row's key is the vector's first half, its value the second."""

    def __init__(self, layer: LayerInfo, capacity: int, offload: bool) -> None:
        self.keeper: Resident | Uva = Uva() if offload and layer.device.type == "cuda" else Resident()
        self.layer = replace(layer, head_dim=layer.head_dim // 2)
        self.rows = self.keeper.allocate_store(self.layer, capacity)

    def append(self, vectors: Tensor, rows: list[int]) -> None:
        """Add a block [R, H, n, D]."""
        first, second = vectors.tensor_split(2, -1)
        self.keeper.update(first, second, self.rows, rows)

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """[H, stop - start, D] of one row."""
        return torch.cat(self.rows.read(row, start, stop), -1)

    def fetch(self, indices: Tensor) -> Tensor:
        """[B, H, K, D] at the indices [B, H, K], 0 where empty."""
        shape = (*indices.shape, 2, self.layer.head_dim)
        slots = torch.empty(shape, dtype=self.layer.dtype, device=self.layer.device)
        self.keeper.fetch(Selection(indices), self.rows, slots)
        return slots.flatten(3)
