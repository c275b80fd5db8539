"""Whether a request fits: what is counted as the device's memory, what as the machine's, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import INFO, Memory, pipelines

from pariskv import memory
from pariskv.binding import bind
from pariskv.config import parse_config
from pariskv.errors import CapacityError, ConfigError
from pariskv.memory import available_bytes, refuse_if_too_large
from pariskv.planner import Estimate, Need, estimate_layer
from pariskv.registry import Registry
from pariskv.window import Window

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON_GPU = replace(INFO, device=GPU)
WINDOW = Window(sink=4, local=8, update=8)
GB = 10**9
HOSTED = Need(Estimate(prompt=2 * GB, store=5 * GB, rows=GB, codes=3 * GB, hosted=5 * GB), 6 * GB)


class Host(Memory):
    host_resident = True


@pytest.mark.parametrize(("store", "is_hosted"), [("uva", True), ("resident", False), ("auto", False)])
def test_a_store_says_whether_it_is_in_host_memory(store: str, is_hosted: bool) -> None:
    config = parse_config({"store": store, "layers": {"0": {"retriever": "dense"}}})
    bound = bind(config, 2, Registry.load(entry_points=False))
    assert [bound[index].host_resident for index in (0, 1)] == [False, is_hosted]


def test_rows_that_a_gpu_keeps_in_host_memory_are_none_of_the_devices() -> None:
    here, there = pipelines()[0], pipelines("{}", "store: host", retrievers={"host": Host})[0]
    row = 2 * 4 * 4  # key and value, D = 4, float32
    kept = estimate_layer(ON_GPU, here, WINDOW, 100, 12)
    assert (kept.prompt, kept.store, kept.hosted) == (100 * row, 96 * row, 0)
    hosted = estimate_layer(ON_GPU, there, WINDOW, 100, 12)
    assert hosted == replace(kept, hosted=96 * row)
    assert hosted.on_device == kept.on_device - 96 * row
    # A CPU has one memory.
    assert estimate_layer(INFO, there, WINDOW, 100, 12) == kept


@pytest.mark.parametrize(
    ("on_gpu", "on_host", "message"),
    [
        (6, 5, ""),
        (5.9, 5, r"the cache needs about 6\.00 GB \(prompt 2\.00 GB, store 0\.00 GB, .*5\.90 GB are free on cuda; "),
        (6, 4.9, r"the store needs about 5\.00 GB of host memory, 4\.90 GB are free on cpu; shorten the prompt"),
    ],
)
def test_each_memory_is_held_against_what_goes_there(
    on_gpu: float, on_host: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(GB * (on_gpu if device == GPU else on_host)))
    if not message:
        return refuse_if_too_large(HOSTED, GPU)
    with pytest.raises(CapacityError, match=f"not enough memory: {message}"):
        refuse_if_too_large(HOSTED, GPU)


def test_a_store_on_the_device_is_no_matter_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 11 * GB if device == GPU else 0)
    kept = replace(HOSTED.held, hosted=0)
    refuse_if_too_large(Need(kept, 11 * GB), GPU)
    with pytest.raises(CapacityError, match=r"about 12\.00 GB .*store 6\.00 GB"):
        refuse_if_too_large(Need(replace(kept, store=6 * GB), 12 * GB), GPU)


def test_a_machine_that_grows_has_what_is_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 700 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "no-cgroup")
    monkeypatch.delenv(memory.DECLARED, raising=False)
    assert available_bytes(CPU) == 700 * 1024
    monkeypatch.setenv(memory.DECLARED, str(5000 * 1024))
    assert available_bytes(CPU) == (5000 - 200) * 1024
    monkeypatch.setenv(memory.DECLARED, "128GB")
    with pytest.raises(ConfigError, match=r"PARISKV_HOST_MEMORY='128GB': wanted the machine's memory in bytes"):
        available_bytes(CPU)


def test_the_kernels_know_the_same_variable() -> None:
    from pariskv_kernels.available import MACHINE

    assert memory.DECLARED == MACHINE
