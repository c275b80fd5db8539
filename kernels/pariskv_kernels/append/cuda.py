"""`append_token` on a GPU: one block for each row."""

from __future__ import annotations

from numba import cuda
from torch import Tensor

from pariskv_kernels.device import loads_first
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template


def append_token(
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    steady: Tensor,
    length: Tensor,
    active: Tensor,
    sink: int,
    threads: int = 256,
) -> None:
    batch, heads, _, dim = keys.shape
    kernel = append(D=dim, LOADS=blocks_for(heads * dim, threads), THREADS=threads)
    launch(kernel, (batch,), threads, keys, values, rows, steady, length, active, sink)


@template
def append(keys, values, rows, steady, length, active, sink):
    """Every number of the token is asked for before the first is written."""
    thread, b = cuda.threadIdx.x & 1023, cuda.blockIdx.x & 0x7FFFFFFF
    position = length[b]
    slot = position if position < sink else sink + (position - sink) % (steady.shape[1] - sink)
    last = keys.shape[1] * D - 1
    for i in static(LOADS):
        at = min(thread + i * THREADS, last)
        key[i] = keys[b, at // D, 0, at % D]
        value[i] = values[b, at // D, 0, at % D]
    loads_first()
    for i in static(LOADS):
        at = thread + i * THREADS
        if at <= last:
            rows[b, at // D, slot, 0, at % D] = key[i]
            rows[b, at // D, slot, 1, at % D] = value[i]
    cuda.syncthreads()  # everybody knows the position
    if thread == 0:
        steady[b, slot] = active[b]
        length[b] = position + active[b]
