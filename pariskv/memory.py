"""How much memory is free, of a device or of this machine, and the refusal of a request that needs more."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pariskv.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from pariskv.planner import Need

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
DECLARED = "PARISKV_HOST_MEMORY"
"""Environment variable: bytes that the machine will have, where its memory grows as it is used (some virtual ones)."""


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or of this machine and its cgroup; None where nobody says."""
    if device.type == "cuda":
        return _cuda_available(device)
    answers = [answer for answer in (_meminfo_available(), _cgroup_available()) if answer is not None]
    return min(answers, default=None)


def _cuda_available(device: torch.device) -> int:
    """What torch can still have: free on the device or in its own pool, and within its limit for this process."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + torch.cuda.memory_reserved(device) - held, limit - held))


def _meminfo_available() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        return found["MemAvailable"] if DECLARED not in os.environ else _declared(found)
    except (OSError, KeyError):
        pass  # Not Linux, or a kernel that says less.
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _declared(meminfo: Mapping[str, int]) -> int:
    """What is left of the memory that the environment declares."""
    text = os.environ[DECLARED]
    if not text.isdecimal():
        raise ConfigError(f"{DECLARED}={text!r}: wanted the machine's memory in bytes, a whole number")
    return max(0, int(text) - (meminfo["MemTotal"] - meminfo["MemAvailable"]))


def _cgroup_available() -> int | None:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Files that were read count as used until somebody needs the room.
    used -= int(statistics.get("inactive_file", 0))
    return None if limit == "max" else max(0, int(limit) - used)


def refuse_if_too_large(
    need: Need, device: torch.device, wanted: str = "auto", largest: Callable[[], int] | None = None
) -> None:
    """Raise CapacityError where a request exceeds the free memory of the device, or of the machine beside it.

    wanted   `prefill.history`, for the advice
    largest  the longest prompt that fits, for the advice; asked where something does not fit
    """
    held = need.held
    parts = {"prompt": held.prompt, "store": held.store - held.hosted, "device rows": held.rows, "codes": held.codes}
    listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
    what = f"the cache needs about {gigabytes(need.peak)} ({listed}, activations and what stages keep or borrow"
    what += f"; most of it {need.moment})" if need.moment else ")"
    advice = "set prefill.history=auto, " if wanted == "buffer" else ""
    _refuse(what, need.peak, device, advice, largest)
    if held.hosted:
        what = f"the store needs about {gigabytes(held.hosted)} of host memory"
        _refuse(what, held.hosted, torch.device("cpu"), "", largest)


def _refuse(what: str, need: int, device: torch.device, advice: str, largest: Callable[[], int] | None) -> None:
    free = available_bytes(device)
    if free is None or need <= free:
        return
    most = largest() if largest is not None else 0
    raise CapacityError(
        f"not enough memory: {what}, {gigabytes(free)} are free on {device}; {advice}shorten the prompt"
        f"{f' to {most} tokens' if most else ''}, lower max_new_tokens, or set runtime.check_memory=false to try all "
        f"the same (`pariskv plan` shows what fits)"
    )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
