"""Where and with what a benchmark ran: what a reader needs to measure the same again."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pariskv.config import Config, to_dict
from pariskv.registry import own_version

DISTRIBUTIONS = ("torch", "numba", "numba-cuda", "cuda-python", "transformers")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CHECKOUT = Path(__file__).parents[2]


def make_manifest(command: str, arguments: Mapping[str, Any], config: Config | None = None) -> dict[str, Any]:
    """The manifest of one run; `measured` is filled as the run goes (bandwidths, SDPA backends).

    arguments  everything that the command was told, defaults included: plain values only
    config     that of the first row; the others differ in what their rows say
    """
    return {
        "command": command,
        "arguments": dict(arguments),
        "config": None if config is None else to_dict(config),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git_revision(CHECKOUT),
        "hardware": hardware(),
        "measured": {},
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, pariskv and the packages that its speed depends on; None where one is not installed."""
    return {"python": platform.python_version(), "pariskv": own_version()} | {
        name: _version(name) for name in DISTRIBUTIONS
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git_revision(folder: Path) -> str | None:
    """The commit of the checkout that runs, with `-dirty` where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return _output(command) if (folder / ".git").exists() else None


def hardware() -> dict[str, Any]:
    """GPU, driver and CUDA version (None without a GPU), CPU model, usable cores, usable memory in bytes."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        "driver": _driver() if has_gpu else None,
        "cuda": torch.version.cuda if has_gpu else None,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }


def _driver() -> str | None:
    answer = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0] if answer else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int:
    """What this machine has, or what its cgroup allows."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        return machine
    return machine if limit == "max" else min(machine, int(limit))


def _output(command: list[str]) -> str | None:
    """What a program prints, None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
