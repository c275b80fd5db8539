"""How long GPU work takes: medians over replays of a CUDA graph that holds one call per layer.

What cannot be captured is timed by the host's clock: `EagerTimer`.

Replays follow each other without waiting for the host, so that launches cost nothing that a captured
decode step would not pay, and the layers' data together exceed the L2, so that each is read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch

from pariskv.errors import ConfigError
from pariskv.replay import Clock

Call = Callable[[], object]
CUDA: Any = torch.cuda  # its events and streams have no types

L2_MULTIPLE = 4
"""Layers are added until their data exceed this many times the L2."""

MOST_LAYERS = 64
"""More layers than this are not made, however small they are."""

GIB = 1 << 30


class Timer(Protocol):
    """Measures calls; tests have one that only counts.

    runs  how often `before` is called
    """

    device: torch.device
    l2_bytes: int
    runs: int

    def seconds(self, calls: Sequence[Call], before: Callable[[int], object] | None = None) -> float:
        """Seconds per call, for calls that follow each other; `before(run)` comes before each run, untimed."""
        ...


class GraphTimer:
    """The timer of a CUDA device.

    replays  of which the median is taken, after `warm_up` more that are not counted
    Raises ConfigError where there is no CUDA device.
    """

    def __init__(self, replays: int = 20, warm_up: int = 5):
        require_cuda()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        self.warm_up = warm_up
        self.runs = warm_up + replays

    @torch.no_grad()
    def seconds(self, calls: Sequence[Call], before: Callable[[int], object] | None = None) -> float:
        graph = _capture(calls)
        spans: list[tuple[Any, Any]] = []
        for run in range(self.runs):
            if before is not None:
                before(run)
            start, end = CUDA.Event(enable_timing=True), CUDA.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(self.device)
        times = [float(start.elapsed_time(end)) for start, end in spans[self.warm_up :]]
        return median(times) / 1e3 / len(calls)


class EagerTimer:
    """The timer of what cannot be captured: each call by the host's clock, from an idle device to an idle device.

    steps  runs of which the median is taken, after `warm_up` more that are not counted

    Its `l2_bytes` are 0: one layer is enough, for such a call takes far longer than what it could find in the L2.
    """

    l2_bytes = 0

    def __init__(self, device: torch.device, steps: int = 20, warm_up: int = 3):
        self.device, self.warm_up = device, warm_up
        self.runs = warm_up + steps

    @torch.no_grad()
    def seconds(self, calls: Sequence[Call], before: Callable[[int], object] | None = None) -> float:
        clock = Clock(self.device)
        for run in range(self.runs):
            if before is not None:
                before(run)
            for call in calls:
                with clock.running():
                    call()
        return median(clock.seconds[self.warm_up * len(calls) :])


def require_cuda() -> None:
    """Raise ConfigError where there is nothing to benchmark."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "benchmarks need a CUDA device: torch finds none on this machine; run them on one with an NVIDIA GPU "
            "and a torch that was built for CUDA"
        )


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All calls in one graph, after each was made once: that is when kernels compile and constants are made."""
    torch.cuda.synchronize()
    stream = CUDA.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def layers_to_cycle(bytes_per_layer: int, l2_bytes: int) -> int:
    """How many layers it takes for their data to exceed the L2 enough, at most MOST_LAYERS."""
    return min(MOST_LAYERS, L2_MULTIPLE * l2_bytes // max(1, bytes_per_layer) + 1)


def copy_bandwidth(timer: Timer, size: int = GIB) -> float:
    """Bytes per second of a copy within the device's memory, reads and writes counted."""
    source = torch.empty(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * size / timer.seconds([lambda: target.copy_(source)])


def bus_bandwidth(timer: Timer, size: int = GIB) -> float:
    """Bytes per second that the copy engine brings from pinned host memory to the device."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=timer.device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=timer.device)
    return size / timer.seconds([lambda: target.copy_(source, non_blocking=True)])
