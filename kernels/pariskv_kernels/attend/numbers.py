"""Numbers in and out of memory, beyond the device functions that all kernels share."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import cuda

from pariskv_kernels.device import bf16_to_float, fp16_to_float


@cuda.jit(device=True)
def float32_in(word, shift):
    return np.uint32((word >> shift) & 0xFFFFFFFF).view(np.float32)


@cuda.jit(device=True)
def bf16_in(word, shift):
    return bf16_to_float((word >> shift) & 0xFFFF)


@cuda.jit(device=True)
def fp16_in(word, shift):
    return fp16_to_float((word >> shift) & 0xFFFF)


@cuda.jit(device=True)
def float_to_float32(x):
    return np.float32(x)


@cuda.jit(device=True)
def float_to_fp16(x):
    return np.float16(x).view(np.uint16)


@cuda.jit(device=True)
def float_to_bf16(x):
    """The upper half of the bits, rounded to nearest, ties to even."""
    bits = np.int64(np.float32(x).view(np.uint32))
    if x != x:  # rounding could carry a NaN over into a number
        return np.uint16(0x7FC0)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def number_in(dtype: torch.dtype) -> Any:
    """The device function (word int64, shift in bits) -> float32 that takes a number of this dtype out of a word."""
    return {torch.float32: float32_in, torch.bfloat16: bf16_in, torch.float16: fp16_in}[dtype]


def from_float(dtype: torch.dtype) -> Any:
    """The device function from float32 to what a launch makes of this dtype."""
    return {torch.float32: float_to_float32, torch.bfloat16: float_to_bf16, torch.float16: float_to_fp16}[dtype]
