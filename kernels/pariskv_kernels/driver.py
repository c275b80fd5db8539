"""The calls to the CUDA driver that host memory needs, through cuda-python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

LONGEST_LINE = 2**31
"""Bytes from which on the driver takes no line of a two-dimensional copy."""


class DriverError(RuntimeError):
    """A call to the driver failed; the message names it and the driver's error."""


class Driver(Protocol):
    """What `HostBuffer` asks of a driver. Addresses are integers; every failure is a DriverError."""

    same_addresses: bool
    """The device reads registered memory at the address that the host uses."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock the host's pages and map them for the device."""

    def unregister(self, address: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        """Locked and mapped host memory of the driver's own."""

    def free(self, address: int) -> None: ...

    def device_address(self, address: int) -> int:
        """Where the device finds host memory that was registered or allocated."""

    def synchronize(self) -> None:
        """Wait until nothing that the device was given to do is left."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy lines [n, ...] between host and device, in the order of torch's current stream, by the copy engine.

        Each line is contiguous; there may be gaps between lines. Host memory must be one registered range.
        """


class CudaDriver:
    """The real one, on one device."""

    def __init__(self, device: torch.device):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            error.add_note("host memory that a GPU reads needs cuda-python: pip install 'pariskv[cuda]'")
            raise
        self._cuda: Any = driver
        self._device = device
        self._call(driver.cuInit, 0)
        handle = self._call(driver.cuDeviceGet, torch.cuda.current_device() if device.index is None else device.index)
        # The context that torch uses, too. It is kept for as long as the process lives, as torch keeps it.
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, handle)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        self.same_addresses = bool(self._call(driver.cuDeviceGetAttribute, attribute, handle))

    def register(self, address: int, nbytes: int) -> None:
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        with self._current():
            self._call(self._cuda.cuMemHostRegister, address, nbytes, flags)

    def unregister(self, address: int) -> None:
        with self._current():
            self._call(self._cuda.cuMemHostUnregister, address)

    def allocate(self, nbytes: int) -> int:
        flags = self._cuda.CU_MEMHOSTALLOC_PORTABLE | self._cuda.CU_MEMHOSTALLOC_DEVICEMAP
        with self._current():
            return int(self._call(self._cuda.cuMemHostAlloc, nbytes, flags))

    def free(self, address: int) -> None:
        with self._current():
            self._call(self._cuda.cuMemFreeHost, address)

    def device_address(self, address: int) -> int:
        with self._current():
            return int(self._call(self._cuda.cuMemHostGetDevicePointer, address, 0))

    def synchronize(self) -> None:
        with self._current():
            self._call(self._cuda.cuCtxSynchronize)

    def copy(self, source: Tensor, target: Tensor) -> None:
        if source.numel() == 0:
            return
        assert source.shape == target.shape, (source.shape, target.shape)
        assert source.dtype == target.dtype, (source.dtype, target.dtype)
        lines, width = source.shape[0], source[0].nbytes
        pitches = [lines_of.stride(0) * lines_of.element_size() for lines_of in (source, target)]
        if pitches == [width, width] and lines * width < LONGEST_LINE:
            lines, width = 1, lines * width
            pitches = [width, width]
        kinds = self._cuda.CUmemorytype
        plan = self._cuda.CUDA_MEMCPY2D()
        plan.WidthInBytes, plan.Height = width, lines
        for side, tensor, pitch in (("src", source, pitches[0]), ("dst", target, pitches[1])):
            on_host = tensor.device.type == "cpu"
            setattr(plan, f"{side}MemoryType", kinds.CU_MEMORYTYPE_HOST if on_host else kinds.CU_MEMORYTYPE_DEVICE)
            setattr(plan, f"{side}{'Host' if on_host else 'Device'}", tensor.data_ptr())
            setattr(plan, f"{side}Pitch", pitch)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._current():
            self._call(self._cuda.cuMemcpy2DAsync, plan, stream)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """The result of a call that cuda-python returns as (error, result)."""
        error, *result = function(*arguments)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{function.__name__}: {error.name}")
        return result[0] if result else None

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Whichever thread asks, and whether or not it has used the device before."""
        self._call(self._cuda.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            self._call(self._cuda.cuCtxPopCurrent)


@lru_cache
def cuda_driver(device: torch.device) -> CudaDriver:
    """The driver for a CUDA device; raises ImportError without cuda-python, DriverError without a driver."""
    return CudaDriver(device)
