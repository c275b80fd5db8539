"""What a CUDA graph cannot hold, found on any device: operations whose result, or its shape, goes through the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ASKS_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount")


class AsksHost(Exception):
    """A stage asked the host; the message names the operation."""


class _NoHostResults(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Refuses operators that wait for the device, or whose result is as long as the data says."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ASKS_THE_HOST:
            raise AsksHost("a number read by item(), int() or if" if name == "_local_scalar_dense" else f"{name}()")
        if name.startswith("index") and any(
            isinstance(index, Tensor) and str(index.dtype) == "torch.bool"
            for argument in args
            for index in (argument if isinstance(argument, list | tuple) else [])
        ):
            raise AsksHost("an index by a mask")
        return func(*args, **(kwargs or {}))


class _NoLists(TorchFunctionMode):
    """Refuses `tolist`, which reads the memory of a CPU without an operator."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            raise AsksHost("tolist()")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host() -> Iterator[None]:
    """Inside of the block what asks the host raises AsksHost. Run the code once before: what is cached may ask."""
    with _NoLists(), _NoHostResults():  # type: ignore[no-untyped-call]  # torch has no types here
        yield
