"""Whether a request fits, asked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pariskv.binding import LayerPipeline
from pariskv.errors import CapacityError
from pariskv.types import LayerInfo
from pariskv.window import Window

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Estimate:
    """Bytes that a request takes at its largest, at the end of the prefill.

    prompt  the prompt's keys and values while it is read;  store  the zone's rows
    rows    sink, ring and slots;                           codes  the index
    """

    prompt: int = 0
    store: int = 0
    rows: int = 0
    codes: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.store + self.rows + self.codes

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.prompt + other.prompt, self.store + other.store, self.rows + other.rows, self.codes + other.codes
        )


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
    return Estimate(prompt=row * tokens, store=row * zone, rows=row * device, codes=codes)


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
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


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
    """Raise CapacityError where the estimate exceeds the memory that is free."""
    free = available_bytes(device)
    if free is not None and need.total > free:
        raise CapacityError(
            f"not enough memory: the cache needs about {gigabytes(need.total)} (prompt {gigabytes(need.prompt)}, store "
            f"{gigabytes(need.store)}, device rows {gigabytes(need.rows)}, codes {gigabytes(need.codes)}), "
            f"{gigabytes(free)} are free on {device}; shorten the prompt, lower max_new_tokens, or set "
            f"runtime.check_memory=false to try all the same"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
