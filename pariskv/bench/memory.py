"""`pariskv bench memory`: how fast host memory that the GPU reads is had, beside the driver's own `cuMemHostAlloc`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, refuse

Clock = Callable[[], float]


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes; each is allocated once by either way."""

    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.sizes)


def measure(
    settings: Settings, device: torch.device, driver: Any = None, clock: Clock = time.perf_counter
) -> Iterator[Row]:
    """The rows, one by one.

    driver  of `pariskv_kernels.memory`, made from the device where it is None
    """
    from pariskv_kernels.driver import cuda_driver

    driver = driver or cuda_driver(device)
    for size in settings.sizes:
        why: list[str] = []
        seconds = _attempt(partial(_allocate, size, device, driver, clock), size, why)
        fallback = _attempt(partial(_fall_back, size, driver, clock), size, why)
        yield make_row(
            "memory",
            "; ".join(why) or None,
            bytes=size,
            seconds=seconds,
            gb_per_s=size / seconds / 1e9 if seconds else None,
            fallback_gb_per_s=size / fallback / 1e9 if fallback else None,
        )


def _attempt(allocate: Callable[[], float], size: int, why: list[str]) -> float | None:
    try:
        refuse(size, torch.device("cpu"), f"{size} bytes")
        return allocate()
    except (*TOO_LARGE, RuntimeError) as error:
        why.append(reason(error))
        return None


class _WithoutFallback:
    """A driver that gives no memory of its own, so that only the fast way is measured."""

    def __init__(self, driver: Any):
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def allocate(self, nbytes: int) -> int:
        from pariskv_kernels.driver import DriverError

        raise DriverError("the fast way is not possible here; the log says why")


def _allocate(size: int, device: torch.device, driver: Any, clock: Clock) -> float:
    """Seconds until memory of `size` bytes can be used by host and device; given back afterwards."""
    from pariskv_kernels.memory import HostBuffer

    start = clock()
    buffer = HostBuffer(size, device, driver=_WithoutFallback(driver))
    seconds = clock() - start
    del buffer
    return seconds


def _fall_back(size: int, driver: Any, clock: Clock) -> float:
    start = clock()
    address = driver.allocate(size)
    seconds = clock() - start
    driver.free(address)
    return seconds
