"""How many bytes of tensors are alive, and were at most, while something runs: the planner's scale, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the memory of every tensor that torch makes inside of the block, views of one memory once.

    live  bytes that are alive now;    peak  the most of it so far

    Not seen are tensors that were made before, that only exist inside of an operation, or that are made without
    torch. On the device "meta" the bytes are those that the tensors would take.

    >>> with Meter() as meter:
    ...     kept = torch.zeros(1000) + 1
    >>> meter.live, meter.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor, given)
        return out

    def restart(self) -> None:
        """Let the peak begin anew from what is alive."""
        self.peak = self.live

    def _count(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known and key not in given:
            self._known[key] = storage.nbytes()
            self.live += self._known[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, of several views of one memory once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
