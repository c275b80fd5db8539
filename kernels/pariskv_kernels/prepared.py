"""A compiled kernel, ready to be launched by the driver: what Numba's own launches leave to be gained.

- **Without Numba's way to a launch**, which looks at every argument anew. Here everything about a launch but its
  tensors' addresses is worked out once, and kept for all launches with the same shapes and numbers.
- **A kernel is on its way while the one before it ends** (programmatic dependent launch, from compute capability 9.0
  on). Kernels of `specialise.template` begin with `device.wait_for_the_kernels_before`, so that they may be started
  early: their blocks are placed while the last ones of the kernel before them still run, and wait there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pariskv_kernels.driver import DriverError

LAUNCHES = 1 << 12
"""Prepared launches that are kept: some twenty are in a layer's step, and layers of one shape share them."""

ADDRESS = 4
"""Where an array's address is among its parameters, as Numba lays them out: two unused ones, two sizes, the address."""


class PreparedLaunch:
    """A kernel, its grid, its stream and the form of its arguments; `start(addresses)` launches it.

    arrays  example arguments, as Numba takes them: arrays, whose addresses each launch replaces, and numbers
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], threads: int, stream: int, arrays: Sequence[Any]):
        from cuda.bindings import driver

        self._driver: Any = driver
        compiled = kernel.compile(tuple(kernel.typeof_pyval(one) for one in arrays))
        self._function = driver.CUfunction(int(compiled._codelibrary.get_cufunc().handle))
        self._cells, self._addresses = _parameters(compiled, arrays)
        self._pointers = (ctypes.c_void_p * len(self._cells))(*map(ctypes.addressof, self._cells))
        self._attributes = [_early_start()] if _starts_early() else []
        self._config = _configuration(grid, threads, stream, self._attributes)
        self._lock = threading.Lock()

    def start(self, addresses: Sequence[int]) -> None:
        """Launch with the arrays at these addresses, in the order of the arguments; DriverError where refused."""
        with self._lock:  # the driver has read the parameters when it returns
            for cell, address in zip(self._addresses, addresses, strict=True):
                cell.value = address
            (error,) = self._driver.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(self._pointers), 0)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"cuLaunchKernelEx: {error.name}")


def _parameters(compiled: Any, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The kernel's parameters, each in memory of its own, and those of them that are the arrays' addresses."""
    cells: list[Any] = []
    addresses: list[Any] = []
    for kind, value in zip(compiled.argument_types, arrays, strict=True):
        flat: list[Any] = []  # integers and ctypes
        compiled._prepare_args(kind, value, 0, [], flat)
        made = [one if isinstance(one, ctypes._SimpleCData) else ctypes.c_int64(one) for one in flat]
        cells += made
        if hasattr(value, "__cuda_array_interface__"):
            address = made[ADDRESS]
            assert address.value == value.__cuda_array_interface__["data"][0], "numba-cuda passes arrays otherwise"
            addresses.append(address)
    return cells, addresses


def _configuration(grid: tuple[int, ...], threads: int, stream: int, attributes: list[Any]) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = 0
    config.hStream = driver.CUstream(stream)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@lru_cache
def _early_start() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _starts_early() -> bool:
    """Whether the current device knows programmatic dependent launches."""
    from numba import cuda

    from pariskv_kernels.device import KNOWS_DEPENDENT_LAUNCHES

    return bool(cuda.get_current_device().compute_capability >= KNOWS_DEPENDENT_LAUNCHES)
