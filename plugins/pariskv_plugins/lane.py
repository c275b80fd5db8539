"""Where a store's copies to the host run: beside what the device computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from pariskv.errors import BindingError


class Lane(Protocol):
    """What a store asks of it; `SideStream`, or in tests on a CPU one that has nothing to wait for."""

    def copies(self, *sources: Tensor) -> AbstractContextManager[None]:
        """What is started inside may read the sources, once they have been computed, until it is done."""

    def settle(self) -> None:
        """Make torch's current stream wait for the copies; the host does not wait."""


class SideStream:
    """A stream that all stores of a device share, and where this store's last copy ends in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, _side_stream(device)
        self._last: torch.cuda.Event | None = None
        self._waiting: set[torch.cuda.Stream] = set()  # streams that wait for it already

    @contextmanager
    def copies(self, *sources: Tensor) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for source in sources:
            source.record_stream(self.stream)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            self._last, self._waiting = self.stream.record_event(), set()

    def settle(self) -> None:
        if self._last is None:
            return
        if torch.cuda.is_current_stream_capturing():
            self._check_capture()
            return
        stream = torch.cuda.current_stream(self.device)
        if stream not in self._waiting:
            stream.wait_event(self._last)
            self._waiting.add(stream)

    def _check_capture(self) -> None:
        """A graph cannot wait for what was started outside of it; the stream that replays it must have."""
        if not self._waiting:
            raise BindingError(
                "rows are still on their way to the store, and a captured step cannot wait for them; run one step "
                "before the capture, or call the store's settle()"
            )


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
