"""The store on the layer's own device: no transfer, for a CPU or where the history fits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pariskv_kernels.gather import gather_rows
from torch import Tensor

from pariskv.errors import BindingError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import LayerInfo, Selected, Selection, Store
from pariskv_plugins.blocks import check_block


class ResidentStore(Store):
    """rows [B, H, capacity, 2, D], the key and the value of a token side by side."""

    can_fork = True

    def __init__(self, layer: LayerInfo, capacity: int) -> None:
        size = (layer.batch, layer.kv_heads, capacity, 2, layer.head_dim)
        self.rows = torch.zeros(size, dtype=layer.dtype, device=layer.device)
        self.capacity = capacity
        self.length = [0] * layer.batch

    def append(self, keys: Tensor, values: Tensor, rows: Sequence[int]) -> None:
        """Write one block [R, H, n, D] of the given batch rows after what they hold, and count it."""
        heads, dim = self.rows.shape[1], self.rows.shape[-1]
        check_block("resident", self, heads, dim, keys, values, rows)
        n = keys.shape[2]
        for source, row in enumerate(rows):
            start = self.length[row]
            self.rows[row, :, start : start + n, 0] = keys[source]
            self.rows[row, :, start : start + n, 1] = values[source]
            self.length[row] = start + n

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = self.rows[row, :, start:stop].unbind(2)
        return keys, values

    def crop(self, row: int, tokens: int) -> None:
        self.length[row] = min(self.length[row], tokens)

    def grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        batch, heads, _, two, dim = self.rows.shape
        rows = self.rows.new_zeros(batch, heads, capacity, two, dim)
        rows[:, :, : self.capacity] = self.rows
        self.rows, self.capacity = rows, capacity

    @property
    def host_bytes(self) -> int:
        return self.rows.nbytes if self.rows.device.type == "cpu" else 0

    @property
    def device_bytes(self) -> int:
        return 0 if self.rows.device.type == "cpu" else self.rows.nbytes


class Resident(Retriever):
    """Keeps and fetches rows; chooses nothing itself, so another retriever selects."""

    graph_safe = True

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        return ResidentStore(layer, capacity)

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        valid = gather_rows(own(store).rows, selection.indices, slots)
        return Selected(valid, selection.bias, selection.extra, selection.partial)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        own(store).append(keys, values, rows)


def own(store: Store) -> ResidentStore:
    """The store, if `allocate_store` of this module made it."""
    if not isinstance(store, ResidentStore):
        raise BindingError(
            f"resident: got a {type(store).__name__}, but fetch and update only know the store of resident's own "
            f"allocate_store; take all three stages from one retriever"
        )
    return store


@hookimpl
def register_retrievers(register: Register) -> None:
    register("resident", Resident)
