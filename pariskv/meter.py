"""How many bytes of tensors are alive, and were at most, while something runs: the planner's scale, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Meter(TorchDispatchMode):
    """Counts the memory of every tensor that torch makes inside of the block, views of one memory once.

    live  bytes that are alive now;    peak  the most of it so far

    A tensor that only exists inside of an operation is not seen, nor what is allocated without torch. On the device
    "meta" the bytes are those that the tensors would take.

    >>> with Meter() as meter:
    ...     kept = torch.zeros(1000) + 1
    >>> meter.live, meter.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def restart(self) -> None:
        """Let the peak begin anew from what is alive."""
        self.peak = self.live

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
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
