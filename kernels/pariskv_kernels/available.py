"""How much memory this process can still take, from what Linux says in files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

MACHINE = "PARISKV_HOST_MEMORY"
"""Environment variable: bytes that the machine will have, where its memory grows as it is used (some virtual ones)."""

# Folder, then the files with the limit and the use, then the entry of memory.stat with what can be dropped.
CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/unified", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

UNLIMITED = 1 << 62
"""Bytes; v1's word for no limit is above that."""


def available_memory() -> int:
    """Bytes that this process can still take: of the machine, of its cgroup (v1, v2) and of the groups above that."""
    return tightest_limit()[0]


def tightest_limit(root: Path = Path("/")) -> tuple[int, str]:
    """The bytes that are available, and what sets that limit. Where nobody says: sys.maxsize."""
    return min([*_of_machine(root), *_of_cgroups(root)], default=(sys.maxsize, "no limit known"))


def _of_machine(root: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    if MACHINE in os.environ:
        yield max(0, _declared() - (found["MemTotal"] - found["MemAvailable"])), MACHINE
    else:
        yield found["MemAvailable"], "MemAvailable of this machine"


def _declared() -> int:
    text = os.environ[MACHINE]
    if not text.isdecimal():
        raise ValueError(f"{MACHINE}={text!r}: wanted the machine's memory in bytes, a whole number")
    return int(text)


def _of_cgroups(root: Path) -> Iterator[tuple[int, str]]:
    paths = list(_own_paths(root))
    for folder, limit_file, used_file, droppable in CGROUPS:
        base = root / folder
        for group in {base, *(parent for path in paths for parent in _up_to(base, base / path))}:
            try:
                limit = (group / limit_file).read_text().strip()
                if limit == "max" or int(limit) >= UNLIMITED:
                    continue
                used = int((group / used_file).read_text())
                statistics = dict(line.split()[:2] for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue  # No such group here, or one without the memory controller.
            # Files that were read count as used until somebody needs the room.
            used -= int(statistics.get(droppable, 0))
            yield max(0, int(limit) - used), f"{limit_file} of cgroup {group}"


def _own_paths(root: Path) -> Iterator[str]:
    """Where this process stands in the trees of cgroups: v2's (`0::PATH`) and v1's of memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # A path with .. leads out of what this namespace shows.
        if (not controllers or "memory" in controllers.split(",")) and ".." not in path:
            yield path.strip("/")


def _up_to(base: Path, group: Path) -> Iterator[Path]:
    """The group and those above it, below base."""
    while group != base:
        yield group
        group = group.parent
