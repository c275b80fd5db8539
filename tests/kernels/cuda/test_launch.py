"""Launches are configured once for each stream, and follow the stream that torch is on."""

from __future__ import annotations

import torch
from conftest_cuda import needs_gpu
from numba import cuda
from pariskv_kernels import launch


@cuda.jit
def count(places):
    cuda.atomic.add(places, 0, 1)


@needs_gpu
def test_a_launch_is_configured_once_for_each_stream(device: torch.device) -> None:
    places, other = torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.Stream()
    before = launch._configured.cache_info().misses
    for _ in range(3):
        launch.launch(count, (2,), 4, places)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            launch.launch(count, (2,), 4, places)
    other.synchronize()
    assert places.item() == 48
    assert launch._configured.cache_info().misses == before + 2


@needs_gpu
def test_a_configured_launch_is_captured(device: torch.device) -> None:
    places, graph = torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.CUDAGraph()
    launch.launch(count, (2,), 4, places)  # compiles
    with torch.cuda.graph(graph):
        launch.launch(count, (2,), 4, places)
    assert places.item() == 8
    graph.replay()
    graph.replay()
    assert places.item() == 24
