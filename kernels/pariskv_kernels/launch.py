"""How a kernel meets its tensors: array views, the current stream, and a word while it compiles.

A launch takes the stream that torch is on, so that kernels and torch operations follow each other and
are captured into the same CUDA graph. Nothing here waits for the device.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SWITCH = "PARISKV_CUDA_KERNELS"
"""Environment variable; 0 keeps CUDA tensors on the PyTorch definitions."""

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16}
"""Floating-point types that kernels read as bit patterns, `bf16_to_float` and `fp16_to_float`."""

VIEWS = 1 << 14
"""Array views that are kept."""

CONFIGURATIONS = 1 << 12
"""Configured launches that are kept."""


@lru_cache
def has_numba_cuda() -> bool:
    return (
        os.environ.get(SWITCH, "1") != "0"
        and importlib.util.find_spec("numba") is not None
        and importlib.util.find_spec("numba_cuda") is not None
    )


def is_on_gpu(*tensors: Tensor) -> bool:
    """All tensors are in a GPU's memory, and numba-cuda (extra `[cuda]`) is there to launch kernels on them."""
    return all(tensor.device.type == "cuda" for tensor in tensors) and has_numba_cuda()


def as_array(tensor: Tensor) -> Any:
    """The tensor as a kernel sees it: the same memory, bit patterns for bfloat16 and float16."""
    tensor = tensor.detach().view(BITS.get(tensor.dtype, tensor.dtype))
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    if tensor.device.type == "cpu":
        return _simulated(tensor)
    return _viewed(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.index)


@dataclass(frozen=True)
class _Described:
    """What `as_cuda_array` asks of an array."""

    __cuda_array_interface__: dict[str, Any]


@lru_cache(maxsize=VIEWS)
def _viewed(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int) -> Any:
    """A view of the memory, which keeps nothing alive: a launch's tensors do.

    Numba takes some 80 us for a view, and eager steps come back to the same places.
    """
    from numba import cuda

    number = torch.empty((), dtype=dtype).numpy().dtype
    in_bytes = tuple(stride * number.itemsize for stride in strides)
    interface = {"shape": shape, "strides": in_bytes, "typestr": number.str, "data": (address, False), "version": 3}
    with torch.cuda.device(device):
        return cuda.as_cuda_array(_Described(interface), sync=False)


def _simulated(tensor: Tensor) -> Any:
    """The simulator's device array over the same memory, whatever its strides."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(tensor.numpy())


def launch(kernel: Any, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
    """Start a kernel on torch's current stream; tensors become arrays. An empty grid starts nothing."""
    if 0 in grid:
        return
    arrays = [as_array(one) if isinstance(one, Tensor) else one for one in arguments]
    _tell_of_compilation(kernel)
    if arguments[0].device.type == "cpu":
        kernel[grid, threads](*arrays)
        return
    device = arguments[0].device
    with torch.cuda.device(device):
        handle = torch.cuda.current_stream(device).cuda_stream
        _configured(kernel, grid, threads, handle, device.index)(*arrays)


@lru_cache(maxsize=CONFIGURATIONS)
def _configured(kernel: Any, grid: tuple[int, ...], threads: int, handle: int, device: int) -> Any:
    """The kernel, set to be launched on the stream with that handle; `device` is what stream 0 does not say itself.

    Numba keeps configured launches by their stream object, and `external_stream` makes a new one each time (12.7 us,
    H200, 2026-12-03).
    """
    from numba import cuda

    return kernel[grid, threads, cuda.external_stream(handle)]


_told: set[str] = set()


def _tell_of_compilation(kernel: Any) -> None:
    """One log line for each kernel at its first launch: that is when Numba compiles it, or reads it from disk."""
    name = getattr(getattr(kernel, "py_func", kernel), "__name__", "kernel")
    if name not in _told:
        _told.add(name)
        logger.info("preparing kernel %s (compiled once, then kept on disk)", name)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 in the simulator, to keep its grids small."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def blocks_for(work: int, per_block: int) -> int:
    """Blocks of `per_block` items that cover `work` items."""
    return -(-work // per_block)
