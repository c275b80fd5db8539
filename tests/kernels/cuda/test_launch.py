"""Launches are prepared once for each stream, follow the stream that torch is on, and each other."""

from __future__ import annotations

import pytest
import torch
from conftest_cuda import needs_gpu
from numba import cuda
from pariskv_kernels.launch import _prepared, launch
from pariskv_kernels.specialise import template


@template
def count_up(places, by):
    cuda.atomic.add(places, 0, by)


@template
def neighbours(source, target):
    """target[i] = source[i] + source[i + 1 (in a circle)]: wrong where it starts before source is whole."""
    place = cuda.grid(1)
    if place < source.size:
        target[place] = source[place] + source[(place + 1) % source.size]


count = count_up()


@needs_gpu
def test_a_launch_is_prepared_once_for_each_stream(device: torch.device) -> None:
    places, other = torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.Stream()
    before = _prepared.cache_info().misses
    for _ in range(3):
        launch(count, (2,), 4, places, 1)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            launch(count, (2,), 4, places, 1)
    other.synchronize()
    assert places.item() == 48
    assert _prepared.cache_info().misses == before + 2


@needs_gpu
def test_a_prepared_launch_is_captured(device: torch.device) -> None:
    places, graph = torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.CUDAGraph()
    launch(count, (2,), 4, places, 1)  # compiles
    with torch.cuda.graph(graph):
        launch(count, (2,), 4, places, 1)
    assert places.item() == 8
    graph.replay()
    graph.replay()
    assert places.item() == 24


@needs_gpu
def test_tensors_of_one_form_share_a_launch(device: torch.device) -> None:
    places = torch.zeros(3, dtype=torch.int32, device=device)
    before = _prepared.cache_info().misses
    for place in range(3):
        for _ in range(place + 1):
            launch(count, (1,), 2, places[place : place + 1], 3)
    assert places.tolist() == [6, 12, 18]
    assert _prepared.cache_info().misses == before + 1


@needs_gpu
def test_one_and_one_as_a_float_are_different_parameters(device: torch.device) -> None:
    places = torch.zeros(1, dtype=torch.float32, device=device)
    launch(count, (1,), 1, places, 1)
    launch(count, (1,), 1, places, 1.0)
    launch(count, (1,), 1, places, 0.5)
    assert places.item() == 2.5


@needs_gpu
@pytest.mark.parametrize("captured", [False, True])
def test_a_kernel_sees_all_that_the_one_before_it_wrote(device: torch.device, captured: bool) -> None:
    """A chain of kernels, each of which reads what other blocks of the last one wrote, torch's among them."""
    size, rounds = 1 << 20, 24
    a = torch.randint(0, 100, (size,), device=device)
    b, expected = torch.empty_like(a), a.clone()
    start = a.clone()

    def chain() -> None:
        a.copy_(start)
        for _ in range(rounds):
            launch(neighbours(), (size // 256,), 256, a, b)
            launch(neighbours(), (size // 256,), 256, b, a)
            a.remainder_(1009)

    chain()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        a.zero_()
        graph.replay()
    for _ in range(rounds):
        for _ in range(2):
            expected = expected + expected.roll(-1)
        expected = expected.remainder(1009)
    assert torch.equal(a, expected)
