"""What every store checks before it takes a block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pariskv.errors import CapacityError, ShapeError
from pariskv.types import Store


def check_block(
    name: str, store: Store, heads: int, head_dim: int, keys: Tensor, values: Tensor, rows: Sequence[int]
) -> None:
    """Raise ShapeError or CapacityError unless a block [R, H, n, D] of the rows fits after what they hold.

    All rows are checked before the first is written, so that a failure leaves nothing half done.
    """
    n = keys.shape[2] if keys.dim() == 4 else -1
    if keys.shape != (len(rows), heads, n, head_dim) or values.shape != keys.shape:
        raise ShapeError(
            f"{name}: wanted keys and values [{len(rows)}, {heads}, n, {head_dim}] for {len(rows)} rows, "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    for row in rows:
        if store.length[row] + n > store.capacity:
            raise CapacityError(
                f"{name}: row {row} holds {store.length[row]} of {store.capacity} tokens, {n} more do not fit; "
                f"call grow first"
            )
