"""The store `uva` where there is no GPU: memory of the process, and copies that are done at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pariskv_kernels.driver import DriverError
from pariskv_kernels.memory import HostBuffer
from pariskv_plugins.uva import Uva, UvaStore, token_bytes
from torch import Tensor

from pariskv.hookspecs import hookimpl
from pariskv.types import LayerInfo, Store


class CopyingDriver:
    """Memory of the process, and copies that are done at once; counts the copies."""

    same_addresses = True

    def __init__(self) -> None:
        self.copies = 0

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        raise DriverError("allocate: not here")

    def free(self, address: int) -> None: ...

    def device_address(self, address: int) -> int:
        return address

    def synchronize(self) -> None: ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.copies += 1
        target.copy_(source)


class BufferOfACpu(HostBuffer):
    """What the device would see is the host's tensor."""

    device = HostBuffer.cpu


class StraightLane:
    """Nothing runs beside anything; notes when the store settled."""

    def __init__(self) -> None:
        self.pending, self.settled = False, 0

    def copies(self, *sources: Tensor) -> AbstractContextManager[None]:
        self.pending = True
        return nullcontext()

    def settle(self) -> None:
        self.settled += self.pending
        self.pending = False


class UvaOfACpu(Uva):
    """`uva` whose device is the CPU."""

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        size = token_bytes(layer)
        buffer = BufferOfACpu(capacity * size, layer.device, unit=size, headroom=8, driver=CopyingDriver())
        return UvaStore(layer, capacity, buffer, StraightLane(), self.options)
