"""What runs leave on the disk: JSON lines that survive a kill; and in what two descriptions differ."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def as_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The rows as JSON, one a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a file; they are on the disk when this returns."""
    if rows:
        with path.open("ab") as file:
            file.write(as_lines(rows))
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def drop_broken_line(path: Path) -> None:
    """Cut off the last line where its writer was stopped in the middle of it."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, one's value, the other's) of every leaf of plain values that is not the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            yield from differences(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    elif one != other:
        yield name, one, other


def differing(one: Any, other: Any, most: int = 4) -> str:
    """The names of the first leaves in which plain values differ, with commas; empty where they are the same."""
    return ", ".join(name for name, _, _ in list(differences(one, other, ""))[:most])
