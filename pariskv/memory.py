"""Whether a request fits, asked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from pariskv.binding import LayerPipeline
from pariskv.errors import CapacityError, ConfigError
from pariskv.types import LayerInfo
from pariskv.window import Window

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
DECLARED = "PARISKV_HOST_MEMORY"
"""Environment variable: bytes that the machine will have, where its memory grows as it is used (some virtual ones)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a request takes at its largest, at the end of the prefill.

    prompt  the prompt's keys and values while it is read;  store    the zone's rows
    rows    sink, ring and slots;                           codes    the index
    hosted  what of the store is in host memory beside a GPU; on a CPU everything is in the one memory
    """

    prompt: int = 0
    store: int = 0
    rows: int = 0
    codes: int = 0
    hosted: int = 0

    @property
    def on_device(self) -> int:
        return self.prompt + self.store + self.rows + self.codes - self.hosted

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def estimate_layer(
    info: LayerInfo, pipeline: LayerPipeline, window: Window, prompt_tokens: int, new_tokens: int
) -> Estimate:
    """What one layer of a request takes."""
    tokens = prompt_tokens + new_tokens
    row = 2 * info.batch * info.kv_heads * info.head_dim * (torch.finfo(info.dtype).bits // 8)
    zone = 0 if pipeline.indexes == "none" else window.zone(tokens)
    kept = window.without_zone() if pipeline.indexes == "none" else window
    device = window.sink + kept.ring_capacity(prompt_tokens, tokens) + pipeline.slots(info.group)
    codes = sum(code_bytes(info, encoder.allocate_codes, encoder.block, zone) for encoder in pipeline.encoders)
    hosted = row * zone if pipeline.host_resident and info.device.type == "cuda" else 0
    return Estimate(prompt=row * tokens, store=row * zone, rows=row * device, codes=codes, hosted=hosted)


def code_bytes(info: LayerInfo, allocate_codes: object, block: int, tokens: int) -> int:
    """Bytes of a format's codes for `tokens` tokens a row, from two small allocations on a line."""
    assert callable(allocate_codes)
    if not tokens:
        return 0
    small = replace(info, device=torch.device("cpu"))
    step = 8 * block
    one, two = (int(allocate_codes(small, count).nbytes) for count in (step, 2 * step))
    return one + (two - one) * max(0, tokens - step) // step


def estimate(
    infos: Mapping[int, LayerInfo],
    pipelines: Mapping[int, LayerPipeline],
    windows: Mapping[int, Window],
    prompt_tokens: int,
    new_tokens: int,
) -> Estimate:
    """What all layers of a request take."""
    total = Estimate()
    for index, pipeline in pipelines.items():
        total += estimate_layer(infos[index], pipeline, windows[index], prompt_tokens, new_tokens)
    return total


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or of this machine and its cgroup; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    answers = [answer for answer in (_meminfo_available(), _cgroup_available()) if answer is not None]
    return min(answers, default=None)


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


def refuse_if_too_large(need: Estimate, device: torch.device) -> None:
    """Raise CapacityError where the estimate exceeds the free memory of the device, or of the machine beside it."""
    parts = {"prompt": need.prompt, "store": need.store - need.hosted, "device rows": need.rows, "codes": need.codes}
    listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
    _refuse(f"the cache needs about {gigabytes(need.on_device)} ({listed})", need.on_device, device)
    if need.hosted:
        _refuse(f"the store needs about {gigabytes(need.hosted)} of host memory", need.hosted, torch.device("cpu"))


def _refuse(what: str, need: int, device: torch.device) -> None:
    free = available_bytes(device)
    if free is not None and need > free:
        raise CapacityError(
            f"not enough memory: {what}, {gigabytes(free)} are free on {device}; shorten the prompt, lower "
            f"max_new_tokens, or set runtime.check_memory=false to try all the same"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
