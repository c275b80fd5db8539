"""The store in host memory whose rows the CPU gathers: offloading for a device that does not read host memory itself.

A step's indices come to the CPU, which copies the selected rows side by side and sends them as one block. So the
host waits for the device at every fetch, and a step cannot be captured. `uva` does without either, where there is
numba-cuda.

In memory a token's heads lie side by side, [capacity, B, H, 2, D], so that a block of a single row crosses the bus in
one piece; `rows` is the view [B, H, capacity, 2, D] of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from pariskv_kernels.available import tightest_limit
from pariskv_kernels.gather import gather_rows
from torch import Tensor

from pariskv.errors import BindingError, CapacityError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import LayerInfo, Selected, Selection, Store
from pariskv_plugins.blocks import check_block

HOST = torch.device("cpu")


class HostStore(Store):
    """rows [B, H, capacity, 2, D] in host memory, page-locked beside a CUDA device."""

    can_fork = True

    def __init__(self, layer: LayerInfo, capacity: int) -> None:
        self.layer = layer
        self.length = [0] * layer.batch
        self._take(capacity)

    def _take(self, capacity: int) -> None:
        shape = (capacity, self.layer.batch, self.layer.kv_heads, 2, self.layer.head_dim)
        refuse_if_too_large(shape, self.layer)
        self._held = torch.zeros(shape, dtype=self.layer.dtype, device=HOST)
        self._unlock = lock_pages(self._held, self) if self.layer.device.type == "cuda" else None
        self.rows = self._held.permute(1, 2, 0, 3, 4)
        self.capacity = capacity

    def append(self, keys: Tensor, values: Tensor, rows: Sequence[int]) -> None:
        """Send one block [R, H, n, D] of the given batch rows to where each row ends, and count it."""
        check_block("host", self, self.layer.kv_heads, self.layer.head_dim, keys, values, rows)
        n = keys.shape[2]
        block = torch.stack((keys, values), dim=3).transpose(1, 2).contiguous()  # [R, n, H, 2, D]
        for source, row in enumerate(rows):
            start = self.length[row]
            self._held[start : start + n, row] = block[source]
            self.length[row] = start + n

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        block = self._held[start:stop, row].to(self.layer.device)
        keys, values = block.transpose(0, 1).unbind(2)
        return keys, values

    def crop(self, row: int, tokens: int) -> None:
        self.length[row] = min(self.length[row], tokens)

    def grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        old, unlock = self._held, self._unlock
        self._take(capacity)
        self._held[: len(old)] = old
        if unlock is not None:
            unlock()

    def fetch(self, selection: Selection, slots: Tensor) -> Selected:
        """Write the rows at the selection's indices into the slots [B, H, K, 2, D], in their order."""
        if slots.device == HOST:
            gather_rows(self.rows, selection.indices, slots)
        else:
            indices = selection.indices.to(HOST)
            # torch does not give this memory away again before the copy is done.
            block = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
            gather_rows(self.rows, indices, block)
            slots.copy_(block, non_blocking=True)
        return Selected(selection.indices >= 0, selection.bias, selection.extra, selection.partial)

    @property
    def host_bytes(self) -> int:
        return self._held.nbytes

    @property
    def device_bytes(self) -> int:
        return 0


class Host(Retriever):
    """Keeps rows in host memory and brings them by way of the CPU; another retriever selects."""

    host_resident = True

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        return HostStore(layer, capacity)

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        return own(store).fetch(selection, slots)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        own(store).append(keys, values, rows)


def refuse_if_too_large(shape: Sequence[int], layer: LayerInfo) -> None:
    """Raise CapacityError where this machine, or its cgroup, has less memory than that left."""
    need = torch.Size(shape).numel() * layer.dtype.itemsize
    available, limit = tightest_limit()
    if need > available:
        raise CapacityError(
            f"layer {layer.index}: store host needs {need / 1e9:.3f} GB, {available / 1e9:.3f} GB are available "
            f"({limit}); use a shorter context or a smaller batch"
        )


def lock_pages(memory: Tensor, owner: object) -> weakref.finalize[..., Any]:
    """Let the device's copy engine reach the memory, until the result is called or the owner is gone.

    Not by `pin_memory=True`: torch rounds what it pins up to a power of two, and keeps it.
    Raises CapacityError where the driver refuses.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError as error:
        raise CapacityError(
            f"store host: {memory.nbytes / 1e9:.3f} GB of host memory cannot be page-locked ({error}); use a shorter "
            f"context or a smaller batch"
        ) from error
    unlock = weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
    unlock.atexit = False  # the process's end gives everything back
    return unlock


def own(store: Store) -> HostStore:
    """The store, if `allocate_store` of this module made it."""
    if not isinstance(store, HostStore):
        raise BindingError(
            f"host: got a {type(store).__name__}, but fetch and update only know the store of host's own "
            f"allocate_store; take all three stages from one retriever"
        )
    return store


@hookimpl
def register_retrievers(register: Register) -> None:
    register("host", Host)
