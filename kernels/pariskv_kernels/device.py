"""Device functions that several kernels share: bit patterns to numbers, and block-wide sums and scans.

No warp intrinsics, so that the same code runs in Numba's simulator.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import config, cuda

KNOWS_DEPENDENT_LAUNCHES = (9, 0)
"""Compute capability from which on a kernel can be started before the one it depends on has ended."""

if config.ENABLE_CUDASIM:

    @cuda.jit(device=True)
    def wait_for_the_kernels_before():
        """Nothing to wait for: the simulator runs one kernel after the other."""

    @cuda.jit(device=True)
    def product(a, b):
        """a * b in float32, rounded before anything is added."""
        return a * b

    @cuda.jit(device=True)
    def loads_first():
        """Nothing to order."""

else:
    from llvmlite import ir
    from numba.cuda import libdevice, types
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature

    @intrinsic
    def wait_for_the_kernels_before(typing_context):
        """Wait until the kernels launched before this one have ended and what they wrote can be seen, then let the
        next one come (it waits here for this one's end). Before it, a kernel must not touch memory.
        """

        def lower(context, builder, signature, arguments):
            if cuda.get_current_device().compute_capability >= KNOWS_DEPENDENT_LAUNCHES:
                for instruction in ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;"):
                    nothing = ir.FunctionType(ir.VoidType(), [])
                    builder.call(ir.InlineAsm(nothing, instruction, "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return signature(types.none), lower

    @cuda.jit(device=True)
    def loads_first():
        """The loads above go out before what is below: the compilers would move each to where it is used, so that
        a thread waits for one after the other. All threads of a warp must get here.
        """
        cuda.syncwarp()

    @cuda.jit(device=True)
    def product(a, b):
        """a * b in float32, rounded before anything is added: never contracted into a fused multiply-add."""
        return libdevice.fmul_rn(a, b)


@cuda.jit(device=True)
def float32_to_float(x):
    return x


@cuda.jit(device=True)
def bf16_to_float(bits):
    # Numba widens an operation on two uint32 to uint64.
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@cuda.jit(device=True)
def fp16_to_float(bits):
    """Half precision from its bits: the exponent moved, subnormals too, then infinities and NaN restored."""
    wide = np.int32(bits)
    magnitude = np.uint32((wide & 0x7FFF) << 13).view(np.float32) * np.float32(2.0**112)
    if wide & 0x7C00 == 0x7C00:
        magnitude = np.uint32((wide & 0x3FF) << 13 | 0x7F800000).view(np.float32)
    return -magnitude if wide & 0x8000 else magnitude


@cuda.jit(device=True)
def joined(highest, mass, other_highest, other_mass):
    """Of two sets of scores together: the highest, and the sum of exp(score - highest); 0 where all are -inf."""
    top = max(highest, other_highest)
    if top == -math.inf:
        return top, np.float32(0)
    return top, np.float32(mass * math.exp(highest - top) + other_mass * math.exp(other_highest - top))


WARP = 32
EVERYBODY = 0xFFFFFFFF

if config.ENABLE_CUDASIM:

    @cuda.jit(device=True)
    def block_max(value, warps, thread, threads):
        """The largest of the block's values, for all its threads.

        warps  shared, of their type, an entry for each warp
        """
        cuda.syncthreads()
        if thread == 0:
            warps[0] = value
        cuda.syncthreads()
        cuda.atomic.max(warps, 0, value)
        cuda.syncthreads()
        return warps[0]

    @cuda.jit(device=True)
    def block_sum(value, warps, thread, threads):
        """The sum of the block's float32 values, for all its threads; warps as in `block_max`."""
        cuda.syncthreads()
        if thread == 0:
            warps[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(warps, 0, value)
        cuda.syncthreads()
        return warps[0]

    @cuda.jit(device=True)
    def exchanged(value, shared, thread, step):
        """The value of the thread `thread ^ step` of the same warp. All threads of the block must get here.

        step    a power of two below WARP
        shared  of the value's type, an entry for each thread; holds anything before and after
        """
        cuda.syncthreads()
        shared[thread] = value
        cuda.syncthreads()
        return shared[thread ^ step]

    @cuda.jit(device=True)
    def scan(values, thread, threads):
        """Inclusive sums over a block: values[t] becomes values[0] + ... + values[t], and so does what is returned.

        values  shared, `threads` entries, a power of two; ends with a barrier
        """
        step = 1
        while step < threads:
            cuda.syncthreads()
            before = values[thread - step] if thread >= step else 0
            cuda.syncthreads()
            values[thread] += before
            step *= 2
        cuda.syncthreads()
        return values[thread]

else:

    @cuda.jit(device=True)
    def exchanged(value, shared, thread, step):
        """As in the simulator, within the warp: `shared` is not touched."""
        return cuda.shfl_xor_sync(EVERYBODY, value, step)

    @cuda.jit(device=True)
    def warp_max(value):
        step = WARP // 2
        while step > 0:
            value = max(value, cuda.shfl_xor_sync(EVERYBODY, value, step))
            step //= 2
        return value

    @cuda.jit(device=True)
    def block_max(value, warps, thread, threads):
        """The largest of the block's values, as in the simulator: within warps, then over the warps."""
        value = warp_max(value)
        cuda.syncthreads()
        warps[thread // WARP] = value
        cuda.syncthreads()
        return warp_max(warps[min(thread % WARP, (threads - 1) // WARP)])

    @cuda.jit(device=True)
    def warp_sum(value):
        step = WARP // 2
        while step > 0:
            value += cuda.shfl_xor_sync(EVERYBODY, value, step)
            step //= 2
        return value

    @cuda.jit(device=True)
    def block_sum(value, warps, thread, threads):
        """The sum of the block's values, as in the simulator: within warps, then over the warps."""
        value = warp_sum(value)
        cuda.syncthreads()
        warps[thread // WARP] = value
        cuda.syncthreads()
        lane = thread % WARP
        return warp_sum(warps[lane] if lane < (threads + WARP - 1) // WARP else np.float32(0))

    @cuda.jit(device=True)
    def warp_scan(value, lane):
        step = 1
        while step < WARP:
            before = cuda.shfl_up_sync(EVERYBODY, value, step)
            if lane >= step:
                value += before
            step *= 2
        return value

    @cuda.jit(device=True)
    def scan(values, thread, threads):
        """Inclusive sums over a block, as in the simulator: within warps, then over the warps."""
        lane, warp = thread % WARP, thread // WARP
        mine = warp_scan(values[thread], lane)
        cuda.syncthreads()
        values[thread] = mine
        cuda.syncthreads()
        totals = values[min(lane * WARP + WARP - 1, threads - 1)]
        cuda.syncthreads()
        before = cuda.shfl_sync(EVERYBODY, warp_scan(totals, lane), max(warp - 1, 0))
        if warp > 0:
            mine += before
        values[thread] = mine
        cuda.syncthreads()
        return mine


def to_float(dtype: torch.dtype) -> Any:
    """The device function that reads a number of this torch dtype from what a launch makes of it."""

    return {torch.float32: float32_to_float, torch.bfloat16: bf16_to_float, torch.float16: fp16_to_float}[dtype]
