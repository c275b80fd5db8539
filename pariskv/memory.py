"""Whether a request fits, asked before anything is allocated, and by that how its prompt is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from pariskv.binding import LayerPipeline
from pariskv.errors import CapacityError, ConfigError
from pariskv.prompt import History
from pariskv.types import LayerInfo
from pariskv.window import Window

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
DECLARED = "PARISKV_HOST_MEMORY"
"""Environment variable: bytes that the machine will have, where its memory grows as it is used (some virtual ones)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a request takes at its largest, at the end of the prefill.

    prompt  what of the prompt's keys and values is on the device while it is read: all, or what the store has not
    store   the zone's rows;    rows    sink, ring and slots;    codes    the index
    hosted  what of the store is in host memory beside a GPU; on a CPU everything is in the one memory

    Activations are not counted, nor the newest chunk of one layer and the blocks of the store that it looks at.
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
    info: LayerInfo,
    pipeline: LayerPipeline,
    window: Window,
    prompt_tokens: int,
    new_tokens: int,
    history: History = "buffer",
) -> Estimate:
    """What one layer of a request takes whose prompt is read in that way."""
    tokens = prompt_tokens + new_tokens
    row = 2 * info.batch * info.kv_heads * info.head_dim * (torch.finfo(info.dtype).bits // 8)
    zone = 0 if pipeline.indexes == "none" else window.zone(tokens)
    kept = window.without_zone() if pipeline.indexes == "none" else window
    is_streamed = history == "store" and pipeline.indexes != "none"
    # A row that grows from nothing holds as much at most, whether decoded or read.
    held = min(tokens, window.sink + window.ring_capacity(0, tokens)) if is_streamed else tokens
    device = window.sink + kept.ring_capacity(prompt_tokens, tokens) + pipeline.slots(info.group)
    codes = sum(code_bytes(info, encoder.allocate_codes, encoder.block, zone) for encoder in pipeline.encoders)
    hosted = row * zone if pipeline.host_resident and info.device.type == "cuda" else 0
    return Estimate(prompt=row * held, store=row * zone, rows=row * device, codes=codes, hosted=hosted)


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
    history: History = "buffer",
) -> Estimate:
    """What all layers of a request take whose prompt is read in that way."""
    total = Estimate()
    for index, pipeline in pipelines.items():
        total += estimate_layer(infos[index], pipeline, windows[index], prompt_tokens, new_tokens, history)
    return total


@dataclass(frozen=True)
class Planner:
    """How the prompts of a model are read, and what their requests take.

    wanted             `prefill.history`; auto: in a buffer where that fits
    info               (layer index, batch rows) -> the layer's sizes
    pipelines, windows of the layers that retrieve
    """

    wanted: Literal["auto", "buffer", "store"]
    info: Callable[[int, int], LayerInfo]
    pipelines: Mapping[int, LayerPipeline]
    windows: Mapping[int, Window]
    device: torch.device

    def history(self, batch: int, prompt_tokens: int, new_tokens: int) -> History:
        """Where the earlier chunks of such a prompt are, by what is free now.

        Of a later turn all tokens count, as if nothing were held: it goes over the store rather too early.
        """
        if self.wanted != "auto":
            return self.wanted
        free = available_bytes(self.device)
        need = self.estimate(batch, prompt_tokens, new_tokens, "buffer")
        return "buffer" if free is None or need.on_device <= free else "store"

    def estimate(self, batch: int, prompt_tokens: int, new_tokens: int, history: History | None = None) -> Estimate:
        """What such a request takes; history None: in the way in which its prompt would be read."""
        history = history or self.history(batch, prompt_tokens, new_tokens)
        infos = {index: self.info(index, batch) for index in self.pipelines}
        return estimate(infos, self.pipelines, self.windows, prompt_tokens, new_tokens, history)


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


def refuse_if_too_large(need: Estimate, device: torch.device, wanted: str = "auto") -> None:
    """Raise CapacityError where the estimate exceeds the free memory of the device, or of the machine beside it.

    wanted  `prefill.history`, for the advice
    """
    parts = {"prompt": need.prompt, "store": need.store - need.hosted, "device rows": need.rows, "codes": need.codes}
    listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
    advice = "set prefill.history=auto, " if wanted == "buffer" else ""
    _refuse(f"the cache needs about {gigabytes(need.on_device)} ({listed})", need.on_device, device, advice)
    if need.hosted:
        _refuse(f"the store needs about {gigabytes(need.hosted)} of host memory", need.hosted, torch.device("cpu"))


def _refuse(what: str, need: int, device: torch.device, advice: str = "") -> None:
    free = available_bytes(device)
    if free is not None and need > free:
        raise CapacityError(
            f"not enough memory: {what}, {gigabytes(free)} are free on {device}; {advice}shorten the prompt, "
            f"lower max_new_tokens, or set runtime.check_memory=false to try all the same"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
