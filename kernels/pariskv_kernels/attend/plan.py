"""How the blocks of `attend_rows` divide the work, and how they see the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.launch import blocks_for

WORD = 8
"""Bytes of a load."""

QUERIES = 4
"""Query heads that a block serves at most: a thread keeps 8 dimensions of each, and 4 sums."""

BANKS = 32


def constants(head_dim: int, group: int, dtype: torch.dtype, threads: int) -> dict[str, int]:
    """The constants of `attend_tile`, for a power of two of threads, at least D / 4 and 8.

    HEADS query heads a block, CHUNKS blocks for the G of them; TILE tokens a block; PACKED numbers of BITS bits a
    word. A token's key is read by KEY_LANES threads, and KEY_SLOTS tokens at a time; the same for values.
    """
    chunks = blocks_for(group, QUERIES)
    heads = blocks_for(group, chunks)
    key_lanes, value_lanes = head_dim // 8, head_dim // 4
    key_slots, value_slots = threads // key_lanes, threads // value_lanes
    tile = min(4 * key_slots, 8 * value_slots)
    # Rows are padded so that the threads of a warp meet different banks.
    product_row = heads * tile + max(1, BANKS // key_lanes)
    sum_row = value_lanes + BANKS // 4
    return {
        "D": head_dim,
        "G": group,
        "HEADS": heads,
        "CHUNKS": chunks,
        "THREADS": threads,
        "TILE": tile,
        "PARTS": min(16, threads // heads),
        "KEY_LANES": key_lanes,
        "KEY_SLOTS": key_slots,
        "PRODUCT_ROW": product_row,
        "VALUE_LANES": value_lanes,
        "VALUE_SLOTS": value_slots,
        "SUM_ROW": sum_row,
        "SHARED": max(key_lanes * product_row, value_slots * heads * 4 * sum_row),
        "PACKED": WORD // dtype.itemsize,
        "BITS": 8 * dtype.itemsize,
    }


def words_of(rows: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Rows [B, H, M, 2, D] as one line of words that begins at the first row, and its strides over B, H, M and 2.

    Raises ValueError where the rows cannot be read in words.
    """
    per_word = WORD // rows.element_size()
    if rows.stride(-1) != 1 or any(step % per_word for step in (*rows.stride()[:-1], rows.storage_offset())):
        raise ValueError(
            f"rows: wanted D together, and every other stride and the offset a multiple of {per_word} elements, got "
            f"strides {rows.stride()} and offset {rows.storage_offset()}; copy them with rows.contiguous()"
        )
    words = rows.view(torch.int64)
    length = 1 + sum((size - 1) * step for size, step in zip(words.shape, words.stride(), strict=True))
    return words.as_strided((length,), (1,)), words.stride()[:-1]
