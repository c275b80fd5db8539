"""What a benchmark found: rows with exactly the documented fields, as JSON, as a table, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pariskv.errors import ConfigError
from pariskv.units import show_tokens

FIELDS: dict[str, tuple[str, ...]] = {
    "kernels": ("kernel", "tokens", "us", "bytes", "bandwidth_fraction"),
    "layer": ("tokens", "batch", "top_k", "store", "overlap", "us", "dense_us", "ratio", "hit_rate"),
    "decode": (
        "shape",
        "tokens",
        "batch",
        "store",
        "ms",
        "tokens_per_s",
        "dense_ms",
        "dense_tokens_per_s",
        "ratio",
        "device_bytes",
        "host_bytes",
        "ttft_s",
        "dense_ttft_s",
    ),
    "retrievers": (
        "retriever",
        "tokens",
        "batch",
        "top_k",
        "placement",
        "captured",
        "us",
        "dense_us",
        "ratio",
        "index_bytes_per_token",
        "fill_s",
    ),
    "memory": ("bytes", "seconds", "gb_per_s", "fallback_gb_per_s"),
    "batching": (
        "shape",
        "requests",
        "prompt_tokens",
        "new_tokens",
        "batch",
        "store",
        "seconds",
        "read_seconds",
        "tokens_per_s",
        "step_ms",
        "alone_seconds",
        "alone_read_seconds",
        "alone_tokens_per_s",
        "alone_step_ms",
        "ratio",
        "step_ratio",
    ),
}
"""The fields of a row, by command. A row in which something did not run also says `why`."""

Row = dict[str, Any]


@dataclass
class Result:
    """One run of one command."""

    manifest: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.manifest["command"])


def make_row(kind: str, why: str | None = None, **values: Any) -> Row:
    """A row of a command, None for what is not given; `why` says what did not run."""
    assert set(values) <= set(FIELDS[kind]), f"{kind} rows have no {set(values) - set(FIELDS[kind])}"
    row = {name: values.get(name) for name in FIELDS[kind]}
    return row if why is None else {**row, "why": why}


def write_json(path: Path, result: Result) -> None:
    """Write `{manifest, rows}`; ConfigError where the file cannot be written."""
    text = json.dumps({"manifest": result.manifest, "rows": result.rows}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}") from error


def read_json(path: Path) -> Result:
    """The result in a file; ConfigError where that is not one of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    manifest = found.get("manifest") if isinstance(found, dict) else None
    if not isinstance(manifest, dict) or manifest.get("command") not in FIELDS or "rows" not in found:
        raise ConfigError(f"{path}: wanted what `pariskv bench ... --json FILE` writes, got something else")
    return Result(manifest, found["rows"])


def as_table(result: Result) -> Table:
    """The rows for a terminal."""
    table = Table(title=Text(caption(result)), title_justify="left")
    for name in columns(result):
        table.add_column(HEADS.get(name, name), justify="left" if name in TEXTS else "right")
    for row in result.rows:
        table.add_row(*(Text(cell(name, row.get(name))) for name in columns(result)))
    return table


def as_markdown(result: Result) -> str:
    """The rows as a Markdown table, with the caption above and what was measured besides below."""
    names = columns(result)
    lines = [[HEADS.get(name, name) for name in names], [":---" if name in TEXTS else "---:" for name in names]]
    lines += [[cell(name, row.get(name)).replace("|", "\\|") for name in names] for row in result.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([caption(result), table, *notes(result)]) + "\n"


def columns(result: Result) -> list[str]:
    """The fields that some row has a value for."""
    wanted = (*FIELDS[result.kind], "why")
    return [name for name in wanted if any(row.get(name) is not None for row in result.rows)]


def caption(result: Result) -> str:
    """One line: the command, the GPU and the day."""
    where = result.manifest["hardware"]["gpu"] or result.manifest["hardware"]["cpu"]
    arguments = {key: value for key, value in result.manifest["arguments"].items() if value not in (None, [], "")}
    told = ", ".join(f"{key} {_argument(value)}" for key, value in arguments.items())
    return f"`pariskv bench {result.kind}` on {where}, {result.manifest['date'][:10]}: {told}"


def _argument(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def notes(result: Result) -> list[str]:
    """What was measured besides the rows: bandwidths, and which SDPA backend `dense` is."""
    measured = result.manifest["measured"]
    said = [
        f"{label}: {measured[key] / 1e9:,.0f} GB/s measured in this run."
        for key, label in (("copy_bytes_per_s", "Copy within the device"), ("bus_bytes_per_s", "Copy from the host"))
        if key in measured
    ]
    for one in measured.get("dense", []):
        times = ", ".join(f"{name} {us:,.1f} µs" for name, us in one["us"].items())
        said.append(f"Dense at {show_tokens(one['tokens'])} tokens, batch {one['batch']}: {one['backend']} ({times}).")
    return [" ".join(said)] if said else []


TEXTS = {"kernel", "store", "shape", "retriever", "placement", "why"}
HEADS = {
    "us": "µs",
    "dense_us": "dense µs",
    "bandwidth_fraction": "of the bandwidth",
    "top_k": "top k",
    "hit_rate": "hit rate",
    "ms": "ms per step",
    "tokens_per_s": "tokens/s",
    "dense_ms": "dense ms",
    "dense_tokens_per_s": "dense tokens/s",
    "device_bytes": "device GB",
    "host_bytes": "host GB",
    "bytes": "MB",
    "ttft_s": "TTFT s",
    "dense_ttft_s": "dense TTFT s",
    "gb_per_s": "GB/s",
    "fallback_gb_per_s": "cuMemHostAlloc GB/s",
    "prompt_tokens": "prompt tokens",
    "new_tokens": "new tokens each",
    "step_ms": "ms per step",
    "read_seconds": "of these reading",
    "alone_seconds": "alone: seconds",
    "alone_read_seconds": "of these reading",
    "alone_tokens_per_s": "tokens/s",
    "alone_step_ms": "ms per step",
    "step_ratio": "ratio of steps",
    "index_bytes_per_token": "index B/token",
    "fill_s": "fill s",
}


def cell(name: str, value: Any) -> str:
    """A value as people read it: `-` where there is none."""
    if value is None:
        return "-"
    show = CELLS.get(name)
    if show is not None:
        return show(value)
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


CELLS: dict[str, Callable[[Any], str]] = {
    "tokens": show_tokens,
    "overlap": lambda share: f"{share:.2f}",
    "hit_rate": lambda share: f"{share:.2f}",
    "bandwidth_fraction": lambda share: f"{share:.2f}",
    "ratio": lambda ratio: f"{ratio:.2f}",
    "captured": lambda is_captured: "yes" if is_captured else "no",
    "fill_s": lambda seconds: f"{seconds:,.2f}",
    "ms": lambda ms: f"{ms:,.2f}",
    "step_ms": lambda ms: f"{ms:,.2f}",
    "alone_step_ms": lambda ms: f"{ms:,.2f}",
    "read_seconds": lambda seconds: f"{seconds:,.2f}",
    "alone_seconds": lambda seconds: f"{seconds:,.2f}",
    "alone_read_seconds": lambda seconds: f"{seconds:,.2f}",
    "step_ratio": lambda ratio: f"{ratio:.2f}",
    "dense_ms": lambda ms: f"{ms:,.2f}",
    "ttft_s": lambda seconds: f"{seconds:,.2f}",
    "dense_ttft_s": lambda seconds: f"{seconds:,.2f}",
    "seconds": lambda seconds: f"{seconds:,.2f}",
    "bytes": lambda count: f"{count / 1e6:,.2f}",
    "device_bytes": lambda count: f"{count / 1e9:,.1f}",
    "host_bytes": lambda count: f"{count / 1e9:,.1f}",
}
