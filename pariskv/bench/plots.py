"""Pictures of results: a layer's latency against the length, decode's throughput against the batch."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pariskv.bench.output import Result, Row, read_json
from pariskv.errors import ConfigError
from pariskv.units import show_tokens

Line = list[tuple[float, float]]
Lines = dict[str, Line]


def plot(files: Sequence[Path], out: Path) -> list[Path]:
    """Draw what the files of `layer` and `decode` hold into SVG files; returns those that were written.

    Raises ConfigError without matplotlib, for other files, and where there is nothing to draw.
    """
    figure = _matplotlib()
    results = [read_json(file) for file in files]
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, title, axes, lines in [*latency(results), *throughput(results)]:
        path = out / f"{name}.svg"
        _draw(figure, path, title, axes, lines)
        written.append(path)
    if not written:
        raise ConfigError("nothing to draw: wanted files of `pariskv bench layer` or `decode` with measured rows")
    return written


Picture = tuple[str, str, tuple[str, str], Lines]


def latency(results: Iterable[Result]) -> list[Picture]:
    """Microseconds of one layer against tokens: a picture for each batch and top_k, a line for each store."""
    found: dict[tuple[int, int], Lines] = defaultdict(lambda: defaultdict(list))
    for row in _rows(results, "layer"):
        lines = found[row["batch"], row["top_k"]]
        _add(lines, "dense SDPA", row["tokens"], row["dense_us"])
        _add(lines, row["store"], row["tokens"], row["us"])
    return [
        (
            f"layer-batch{batch}-top{top_k}",
            f"One layer, batch {batch}, top_k {top_k}",
            ("tokens", "µs"),
            _in_order(lines),
        )
        for (batch, top_k), lines in sorted(found.items())
    ]


def throughput(results: Iterable[Result]) -> list[Picture]:
    """Tokens per second against the batch: a picture for each shape and length, a line for each store."""
    found: dict[tuple[str, int], Lines] = defaultdict(lambda: defaultdict(list))
    for row in _rows(results, "decode"):
        lines = found[row["shape"], row["tokens"]]
        _add(lines, "dense", row["batch"], row["dense_tokens_per_s"])
        _add(lines, row["store"], row["batch"], row["tokens_per_s"])
    return [
        (
            f"decode-{shape}-{show_tokens(tokens)}",
            f"{shape}, {show_tokens(tokens)} tokens a row",
            ("batch", "tokens/s"),
            _in_order(lines),
        )
        for (shape, tokens), lines in sorted(found.items())
    ]


def _rows(results: Iterable[Result], kind: str) -> list[Row]:
    return [row for result in results if result.kind == kind for row in result.rows]


def _add(lines: Lines, name: str, x: float, y: float | None) -> None:
    if y is not None and (x, y) not in lines[name]:
        lines[name].append((x, y))


def _in_order(lines: Lines) -> Lines:
    return {name: sorted(points) for name, points in lines.items() if points}


def _draw(figure: Any, path: Path, title: str, axes: tuple[str, str], lines: Lines) -> None:
    canvas = figure.Figure(figsize=(6.4, 4.0), layout="constrained")
    plane = canvas.subplots()
    for name, points in lines.items():
        plane.plot(*zip(*points, strict=True), marker="o", label=name, linestyle="--" if "dense" in name else "-")
    ticks = sorted({x for points in lines.values() for x, _ in points})
    if axes[0] == "tokens":
        plane.set_xscale("log", base=2)
        plane.set_yscale("log")
    plane.set_xticks(ticks, [show_tokens(int(tick)) if axes[0] == "tokens" else f"{tick:g}" for tick in ticks])
    plane.minorticks_off()
    plane.set(title=title, xlabel=axes[0], ylabel=axes[1])
    plane.grid(alpha=0.3)
    plane.legend()
    canvas.savefig(path, metadata={"Date": None})


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'pariskv[plots]'") from error
