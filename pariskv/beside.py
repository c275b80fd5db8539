"""Work of a decode step that the device does beside what follows it, because nobody needs its result yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pariskv.types import Partial

Result = TypeVar("Result")
Next = TypeVar("Next")


class Beside(Generic[Result]):
    """Starts the work on a stream of its own; where that is captured, it is a branch of the graph. On a CPU: at once.

    What the work reads must stay until `result` has been called (what it holds itself, does), which a captured step has
    to do: a graph whose branches do not meet again is refused by CUDA.
    """

    def __init__(self, device: torch.device, work: Callable[[], Result]):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type != "cuda":
            self._result = work()
            return
        self._current = torch.cuda.current_stream(device)
        self._stream = _stream_beside(self._current)
        # So the memory that the stream's earlier work was given back may be used again, too.
        self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            self._result = work()
        self._work: Callable[[], Result] | None = work  # and with it the memory that it reads

    def then(self, work: Callable[[Result], Next]) -> Beside[Next]:
        """Goes on there with more work, which also waits for what else has been started until now.

        `result` is then called of that alone.
        """
        return Beside(self._device, lambda: work(self._result))

    def result(self) -> Result:
        """What the work returned; the device waits for it, the host does not."""
        if self._stream is not None:
            self._current.wait_stream(self._stream)
            self._stream = self._work = None
        return self._result


class PartialBeside(Partial):
    """A partial attention that is worked out beside what follows: whoever reads it first waits for it."""

    _beside: Beside[Partial]

    def __init__(self, beside: Beside[Partial]):
        object.__setattr__(self, "_beside", beside)

    @property
    def out(self) -> Tensor:
        return self._beside.result().out

    @property
    def lse(self) -> Tensor:
        return self._beside.result().lse


@lru_cache
def _stream_beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]


def rejoin(device: torch.device) -> None:
    """Have a capture wait for what was begun beside it: an error came before anybody asked for the `result`."""
    current = torch.cuda.current_stream(device)
    beside = _stream_beside(current)
    with torch.cuda.stream(beside):
        is_captured = torch.cuda.is_current_stream_capturing()
    if is_captured:
        current.wait_stream(beside)
