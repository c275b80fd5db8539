"""Rows of the cache layers that transformers keeps beside ours (sliding windows): exchanged, with padding on the left.

Such a layer holds the newest columns of all rows, [B, H, n, D], each row right-aligned. What stands left of a row's
own tokens is padding, which the attention mask hides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pariskv.errors import ModelError

STOCK = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of transformers whose keys and values are all that they hold."""


def refuse_unknown(layers: Iterable[Any]) -> None:
    """Raise ModelError for layers that hold more than keys and values."""
    for layer in layers:
        if type(layer) not in STOCK:
            raise ModelError(
                f"the model has a {type(layer).__name__} of transformers, whose rows cannot be given to another "
                f"request; answer its prompts one batch after the other"
            )


def take_stock_row(layer: Any, row: int, source: Any, source_row: int, rows: int, columns: int) -> None:
    """Make a row hold the newest columns of a row of another layer, among `rows` rows of `columns` columns."""
    if not layer.is_initialized:
        shape = (rows, source.keys.shape[1], 0, source.keys.shape[3])
        empty = source.keys.new_zeros(shape)
        layer.lazy_initialization(empty, empty)
        layer.keys = layer.values = empty
    widen(layer, columns)
    for mine, other in ((layer.keys, source.keys), (layer.values, source.values)):
        count = min(mine.shape[2], other.shape[2])
        mine[row] = 0
        mine[row, :, mine.shape[2] - count :] = other[source_row, :, other.shape[2] - count :]


def widen(layer: Any, columns: int) -> None:
    """Let a layer count `columns` columns, with padding on the left where it had fewer."""
    held = columns
    if isinstance(layer, DynamicSlidingWindowLayer):
        held = min(columns, layer.sliding_window - 1)
        layer.cumulative_length = columns
    missing = held - layer.keys.shape[2]
    if missing > 0:
        layer.keys, layer.values = (
            torch.nn.functional.pad(tensor, (0, 0, missing, 0)) for tensor in (layer.keys, layer.values)
        )
