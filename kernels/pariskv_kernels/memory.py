"""Host memory that kernels and torch share: a CPU tensor and a CUDA tensor over the same bytes.

`cuMemHostAlloc` gives such memory at some 2 GB/s. Ten times faster: huge pages, touched by many threads, then
registered with the driver. Address space is reserved for more than is used at first, and touched and registered
extent by extent, so that a buffer that grows keeps its address and copies nothing.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pariskv_kernels.available import MACHINE, available_memory, tightest_limit
from pariskv_kernels.driver import Driver, DriverError, cuda_driver

__all__ = ["HostBuffer", "available_memory"]

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
THREADS = 16
MAP_NORESERVE = 0x4000  # Linux; a name of the module mmap only from Python 3.13 on
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostBuffer:
    """Bytes in host memory that the device reads at full bus speed; what they hold at first is not defined.

    nbytes    how many, at least; `self.nbytes` is the number that is there
    unit      bytes that an extent never cuts through, because a copy must stay in one extent (`spans`)
    headroom  address space is reserved for this many times the bytes; growing within it copies nothing
    driver    made from the device where it is None

    The memory is given back once the buffer and every tensor of it are gone, after the device's work is done.

    Raises MemoryError, before anything is allocated, where the machine or a cgroup has less than that available.
    """

    def __init__(
        self, nbytes: int, device: torch.device, *, unit: int = 1, headroom: int = 1, driver: Driver | None = None
    ):
        self.driver = driver or cuda_driver(device)
        self._granule = math.lcm(unit, PAGE)
        self._headroom = headroom
        self._memory = self._allocate(self._rounded(nbytes))

    @property
    def nbytes(self) -> int:
        return self._memory.ends[-1]

    def cpu(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first bytes as a tensor [shape] in host memory."""
        count = self._bytes_of(shape, dtype)
        return torch.from_numpy(np.asarray(_Bytes(self._memory, count))).view(dtype).view(shape)

    def device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same bytes as a CUDA tensor [shape]."""
        count = self._bytes_of(shape, dtype)
        flat: Tensor = torch.as_tensor(_DeviceBytes(self._memory, count))
        return flat.view(dtype).view(shape)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The bytes start .. stop - 1, cut where one extent ends and the next begins."""
        for end in self._memory.ends:
            if start < min(end, stop):
                yield start, min(end, stop)
                start = end

    def grow(self, nbytes: int) -> None:
        """Make room for `nbytes`, keeping what is there. Tensors taken before show the old size.

        Where growing has to copy (a log line says why) they show the old memory, too, and the device is waited for.
        """
        nbytes = self._rounded(nbytes)
        if nbytes <= self.nbytes:
            return
        try:
            self._memory.extend(nbytes)
        except (DriverError, _CannotExtendError) as reason:
            logger.warning("host memory: growing to %s by copying, because %s", _gigabytes(nbytes), str(reason))
            held = self.cpu((self.nbytes,), torch.uint8)
            self._memory = self._allocate(nbytes)
            self.driver.synchronize()  # The device may still be writing to the old memory.
            self.cpu(tuple(held.shape), torch.uint8).copy_(held)

    def _allocate(self, nbytes: int) -> _Mapped | _Allocated:
        _refuse_if_too_large(nbytes)
        try:
            return _Mapped(nbytes, nbytes * self._headroom, self.driver)
        except (OSError, DriverError, _CannotExtendError) as reason:
            logger.warning(
                "host memory: %s by cuMemHostAlloc, the slow way, because %s", _gigabytes(nbytes), str(reason)
            )
        return _Allocated(nbytes, self.driver)

    def _rounded(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._granule)) * self._granule

    def _bytes_of(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        count = math.prod(shape) * dtype.itemsize
        if count > self.nbytes:
            raise ValueError(f"shape: {list(shape)} of {dtype} are {count} bytes, the buffer has {self.nbytes}")
        return count


class _CannotExtendError(Exception):
    """Memory cannot be had, or had more of, at this place; the message says why."""


class _Mapped:
    """`reserve` bytes of address space, of which the first ends[-1] are backed by huge pages and registered."""

    def __init__(self, nbytes: int, reserve: int, driver: Driver):
        if why := _why_no_huge_pages():
            raise _CannotExtendError(why)
        self._driver, self._reserve = driver, reserve
        self.ends = [0]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._mapping = mmap.mmap(-1, reserve + HUGE_PAGE, flags=flags)
        mapped = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-mapped // HUGE_PAGE) * HUGE_PAGE
        self._skipped = self.address - mapped
        self.free = weakref.finalize(self, _unmap, driver, self._mapping, self.address, self.ends)
        self.free.atexit = False  # The process's end gives everything back, and tensors may outlive this.
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self._mapping.madvise(mmap.MADV_DONTFORK)  # A child would get a copy of every locked page.
            self.extend(nbytes)
            self.device_address = driver.device_address(self.address)
        except BaseException:
            self.free()
            raise

    def extend(self, nbytes: int) -> None:
        """Touch and register what lies between the present end and `nbytes`."""
        start = self.ends[-1]
        if start and not self._driver.same_addresses:
            raise _CannotExtendError("this device finds registered memory at addresses of its own")
        if nbytes > self._reserve:
            raise _CannotExtendError(f"address space was reserved for {_gigabytes(self._reserve)}")
        if start:
            _refuse_if_too_large(nbytes - start)
        _touch(self.address + start, nbytes - start)
        try:
            self._driver.register(self.address + start, nbytes - start)
        except DriverError:
            self._mapping.madvise(mmap.MADV_DONTNEED, self._skipped + start, nbytes - start)
            raise
        self.ends.append(nbytes)


class _Allocated:
    """Memory of the driver's own: one extent, which cannot grow."""

    def __init__(self, nbytes: int, driver: Driver):
        try:
            self.address = driver.allocate(nbytes)
        except DriverError as error:
            raise MemoryError(f"host memory: the driver has no {_gigabytes(nbytes)} ({error})") from error
        self.ends = [0, nbytes]
        self.free = weakref.finalize(self, _free, driver, self.address)
        self.free.atexit = False
        try:
            self.device_address = driver.device_address(self.address)
        except BaseException:
            self.free()
            raise

    def extend(self, nbytes: int) -> None:
        raise _CannotExtendError("memory of cuMemHostAlloc has one size")


class _Bytes:
    """What NumPy makes an array of; the array holds this, and this the memory."""

    def __init__(self, memory: _Mapped | _Allocated, count: int):
        self.memory = memory
        self.__array_interface__ = _interface(memory.address, count)


class _DeviceBytes:
    """What torch makes a CUDA tensor of; the tensor holds this, and this the memory."""

    def __init__(self, memory: _Mapped | _Allocated, count: int):
        self.memory = memory
        self.__cuda_array_interface__ = _interface(memory.device_address, count)


def _interface(address: int, count: int) -> dict[str, Any]:
    return {"shape": (count,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


def _unmap(driver: Driver, mapping: mmap.mmap, address: int, ends: list[int]) -> None:
    try:
        driver.synchronize()
        for start in ends[:-1]:
            driver.unregister(address + start)
    finally:
        mapping.close()


def _free(driver: Driver, address: int) -> None:
    driver.synchronize()
    driver.free(address)


def _touch(address: int, nbytes: int) -> None:
    """Make the kernel back the pages, by many threads: each writes a byte of every page of its part."""
    threads = min(THREADS, os.cpu_count() or 1)
    part = -(-nbytes // threads // HUGE_PAGE) * HUGE_PAGE

    def touch(start: int) -> None:
        pages = (ctypes.c_uint8 * min(part, nbytes - start)).from_address(address + start)
        np.ctypeslib.as_array(pages)[::PAGE] = 0

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, range(0, nbytes, part)))


def _why_no_huge_pages() -> str:
    """Empty where there are huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "this system cannot be asked for huge pages"
    try:
        state = HUGE_PAGES.read_text()
    except OSError as error:
        return f"{HUGE_PAGES} cannot be read ({error.strerror})"
    return f"huge pages are switched off ({HUGE_PAGES}: {state.strip()})" if "[never]" in state else ""


def _refuse_if_too_large(nbytes: int) -> None:
    available, limit = tightest_limit()
    if nbytes > available:
        raise MemoryError(
            f"host memory: {_gigabytes(nbytes)} were asked for, {_gigabytes(available)} are available ({limit}); use a "
            f"shorter context or a smaller batch, or, on a machine whose memory grows as it is used, set {MACHINE} to "
            f"the bytes that it will have"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"
