"""How a kernel meets its tensors: as arrays, on the current stream, with a word while it compiles.

A launch takes the stream that torch is on, so that kernels and torch operations follow each other and
are captured into the same CUDA graph. Nothing here waits for the device.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pariskv_kernels.prepared import LAUNCHES, PreparedLaunch

logger = logging.getLogger(__name__)

SWITCH = "PARISKV_CUDA_KERNELS"
"""Environment variable; 0 keeps CUDA tensors on the PyTorch definitions."""

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.bool: torch.uint8}
"""Types that kernels read as another one: bit patterns (`bf16_to_float`, `fp16_to_float`), bytes."""

ANYWHERE = 256
"""An address for arrays that only have a form; nothing reads there."""


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


def launch(kernel: Any, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
    """Start a kernel of `specialise.template` on torch's current stream; tensors become arrays.

    An empty grid starts nothing. The first argument is a tensor.
    """
    if 0 in grid:
        return
    _tell_of_compilation(kernel)
    device = arguments[0].device
    if device.type == "cpu":
        kernel[grid, threads](*(_simulated(one) if isinstance(one, Tensor) else one for one in arguments))
        return
    addresses, forms = [], []
    for one in arguments:
        if isinstance(one, Tensor):
            addresses.append(one.data_ptr())
            forms.append(_Form(one.dtype, one.shape, one.stride()))
        else:
            forms.append(one)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        _prepared(kernel, grid, threads, stream, device.index, *forms).start(addresses)


class _Form(NamedTuple):
    """All about a tensor that a kernel is compiled and launched for, but where it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def array(self) -> Any:
        """An array of this form as a kernel sees it, at a place that each launch replaces."""
        from numba import cuda

        number = torch.empty((), dtype=BITS.get(self.dtype, self.dtype)).numpy().dtype
        in_bytes = tuple(stride * number.itemsize for stride in self.stride)
        interface = {
            "shape": self.shape,
            "strides": in_bytes,
            "typestr": number.str,
            "data": (ANYWHERE, False),
            "version": 3,
        }
        return cuda.as_cuda_array(_Described(interface), sync=False)


@dataclass(frozen=True)
class _Described:
    """What `as_cuda_array` asks of an array."""

    __cuda_array_interface__: dict[str, Any]


@lru_cache(maxsize=LAUNCHES, typed=True)
def _prepared(
    kernel: Any, grid: tuple[int, ...], threads: int, stream: int, device: int, *forms: Any
) -> PreparedLaunch:
    """The launch of a kernel on the stream with that handle, of the current device.

    `typed`: 1, 1.0 and True are different parameters. `device` is what stream 0 does not say itself.
    """
    arrays = [one.array() if isinstance(one, _Form) else one for one in forms]
    return PreparedLaunch(kernel, grid, threads, stream, arrays)


def _simulated(tensor: Tensor) -> Any:
    """The simulator's device array over the same memory, whatever its strides."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(tensor.detach().view(BITS.get(tensor.dtype, tensor.dtype)).numpy())


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
