"""`gather_rows` and `gather_changed` on a GPU, from its own memory or from host memory that it reads over the bus.

One warp copies one row. All of a row's words are asked for before the first is written: a read over the bus takes
more than a microsecond, so what counts is how many are under way.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from pariskv_kernels.device import scan
from pariskv_kernels.launch import blocks_for, launch
from pariskv_kernels.specialise import static, template

WARP = 32
KEEP = -2
"""In place of a position: the slot holds its row already."""

MAX_SLOTS = 4096
MAX_THREADS = 1024
EMPTY = np.uint32(0xFFFFFFFF)
"""-1 as the matching kernel sees it: after every position, so that a selection is ascending with -1 at the end."""


def gather_rows(rows: Tensor, indices: Tensor, out: Tensor, threads: int = 256, lanes: int = WARP) -> Tensor:
    """`lanes` threads copy a row; other than a warp only in the simulator, where threads are dear."""
    valid = torch.empty(indices.shape, dtype=torch.bool, device=indices.device)
    _copy(rows, indices, out, valid, threads, lanes, keeps=False)
    return valid


def gather_changed(
    rows: Tensor,
    indices: Tensor,
    held: Tensor,
    out: Tensor,
    counts: Tensor,
    threads: int = 256,
    lanes: int = WARP,
    match_threads: int = 512,
) -> tuple[Tensor, Tensor]:
    """Match slots and entries, one block for a head; then copy what no slot holds.

    match_threads  a power of two, at most 1024
    """
    batch, heads, slots = indices.shape
    if slots > MAX_SLOTS:
        raise ValueError(f"indices: wanted at most {MAX_SLOTS} positions a head, got {slots}; use gather_rows")
    valid = torch.empty(indices.shape, dtype=torch.bool, device=indices.device)
    source, order = torch.empty_like(indices), torch.empty_like(indices)
    grid = (heads, batch) if slots else (0,)
    unsigned = (indices.view(torch.uint32), held.view(torch.uint32))
    launch(match_slots_kernel(), grid, match_threads, *unsigned, source, order, counts)
    _copy(rows, source, out, valid, threads, lanes, keeps=True)
    return valid, order


def _copy(rows: Tensor, source: Tensor, out: Tensor, valid: Tensor, threads: int, lanes: int, keeps: bool) -> None:
    word = _word(rows, out)
    rows, out = rows.view(word), out.view(word)
    words = rows.shape[-1]
    kernel = copy_rows_kernel(WORDS=words, LANES=lanes, LOADS=blocks_for(2 * words, lanes), KEEPS=keeps)
    launch(kernel, (blocks_for(source.numel(), threads // lanes),), threads, rows, source, out, valid)


def _word(rows: Tensor, out: Tensor) -> torch.dtype:
    """The widest integer that keys and values consist of, wherever they start."""
    for name, tensor in (("rows", rows), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: wanted keys and values that are contiguous, got strides {tensor.stride()}")
    words = (torch.int64, torch.int32, torch.int16)
    return next(word for word in words if all(_consists_of(word.itemsize, tensor) for tensor in (rows, out)))


def _consists_of(num_bytes: int, tensor: Tensor) -> bool:
    steps = (*tensor.stride()[:-1], tensor.shape[-1])
    return all(step * tensor.element_size() % num_bytes == 0 for step in steps) and tensor.data_ptr() % num_bytes == 0


@template
def copy_rows_kernel(rows, source, out, valid):
    """The row at source [B, H, K] to each slot; zero for -1, nothing for KEEP.

    Neighbours copy the same entry of neighbouring heads: in a store whose tokens hold their heads side by side,
    entries in ascending order are then read in the order of their addresses.
    """
    batch, heads, slots = source.shape
    slot = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // LANES
    lane = cuda.threadIdx.x % LANES
    if slot >= batch * heads * slots:
        return
    h = slot % heads
    b = slot // heads % batch
    k = slot // (heads * batch)
    n = source[b, h, k]
    if lane == 0:
        valid[b, h, k] = n >= 0 or (KEEPS and n == KEEP)
    if KEEPS and n == KEEP:
        return
    if n < 0:
        for at in range(lane, 2 * WORDS, LANES):
            out[b, h, k, at // WORDS, at % WORDS] = 0
        return
    for i in static(LOADS):
        # Past the end the last word again: a load without a branch, so that all of them go out together.
        at = min(lane + LANES * i, 2 * WORDS - 1)
        word[i] = rows[b, h, n, at // WORDS, at % WORDS]
    for i in static(LOADS):
        at = lane + LANES * i
        if at < 2 * WORDS:
            out[b, h, k, at // WORDS, at % WORDS] = word[i]


@template
def match_slots_kernel(indices, held, source, order, counts):
    """One block for a head: which slots keep their rows, and which entries the others take.

    source  int32 [B, H, K], the position to copy to each slot, -1 for none, KEEP
    """
    position = cuda.shared.array(MAX_SLOTS, np.uint32)  # the selection, ascending
    entry = cuda.shared.array(MAX_SLOTS, np.uint16)  # where each of them stood
    is_new = cuda.shared.array(MAX_SLOTS, np.uint8)
    new = cuda.shared.array(MAX_SLOTS, np.uint16)  # entries that no slot holds, in order
    sums = cuda.shared.array(MAX_THREADS, np.int32)
    h, b = cuda.blockIdx.x, cuda.blockIdx.y
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    slots = indices.shape[2]
    for e in range(thread, slots, threads):
        is_new[e] = indices[b, h, e] != EMPTY
    load_ascending(indices[b, h], position, entry, thread, threads)

    first = thread * ((slots + threads - 1) // threads)
    last = min(first + (slots + threads - 1) // threads, slots)
    free = 0
    for k in range(first, last):
        at = find(position, slots, held[b, h, k])
        if at >= 0:
            is_new[entry[at]] = 0
            order[b, h, k] = entry[at]
            source[b, h, k] = KEEP
        else:
            order[b, h, k] = -1
            free += 1
    sums[thread] = free
    scan(sums, thread, threads)
    rank = sums[thread] - free
    total_free = sums[threads - 1]
    cuda.syncthreads()

    num_new = 0
    for e in range(first, last):
        num_new += is_new[e]
    sums[thread] = num_new
    scan(sums, thread, threads)
    place = sums[thread] - num_new
    total_new = sums[threads - 1]
    for e in range(first, last):
        if is_new[e]:
            new[place] = e
            place += 1
    cuda.syncthreads()

    for k in range(first, last):
        if order[b, h, k] < 0:
            held[b, h, k] = EMPTY
            source[b, h, k] = -1
            if rank < total_new:
                taken = new[rank]
                held[b, h, k] = indices[b, h, taken]
                source[b, h, k] = indices[b, h, taken]
                order[b, h, k] = taken
            rank += 1
    if thread == 0:
        cuda.atomic.add(counts, 0, slots - total_free)
        cuda.atomic.add(counts, 1, slots - total_free + total_new)


@cuda.jit(device=True)
def load_ascending(indices, position, entry, thread, threads):
    """Bring one head's selection to shared memory, each position with its entry, and sort it if it is not sorted."""
    slots = indices.shape[0]
    size = 1
    while size < slots:
        size *= 2
    unsorted = 0
    for e in range(thread, size, threads):
        position[e] = indices[e] if e < slots else EMPTY
        entry[e] = e
        if 0 < e < slots and indices[e] < indices[e - 1]:
            unsorted = 1
    if cuda.syncthreads_or(unsorted):
        sort_pairs(position, entry, size, thread, threads)


@cuda.jit(device=True)
def sort_pairs(keys, values, size, thread, threads):
    """Sort in shared memory by key, ascending; size is a power of two (a bitonic network)."""
    width = 2
    while width <= size:
        step = width // 2
        while step > 0:
            for low in range(thread, size, threads):
                high = low ^ step
                if high > low and (keys[low] > keys[high]) == (low & width == 0):
                    keys[low], keys[high] = keys[high], keys[low]
                    values[low], values[high] = values[high], values[low]
            cuda.syncthreads()
            step //= 2
        width *= 2


@cuda.jit(device=True)
def find(keys, size, key):
    """Where key stands among the first `size` of the ascending keys, -1 where it does not, or is EMPTY."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low if low < size and keys[low] == key and key != EMPTY else -1
