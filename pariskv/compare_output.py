"""What `pariskv compare` shows: rows as JSON, as tables for a terminal, and quality against the budget as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pariskv.compare import FIELDS, Row
from pariskv.errors import ConfigError

HEADS = {
    "attended_tokens_per_step": "attended",
    "candidate_recall": "candidates",
    "recall": "recall@K",
    "mass_ratio": "mass ratio",
    "output_error": "output error",
    "kl": "KL",
    "argmax_agreement": "argmax",
    "index_bytes_per_token": "index B/token",
    "host_bytes_per_step": "host MB/step",
    "prefill_seconds": "prefill s",
    "ms_per_step": "ms/step",
}
TEXTS = ("retriever", "combine", "protocol")
CELLS: dict[str, Callable[[float], str]] = {
    "attended_tokens_per_step": lambda count: f"{count:,.0f}",
    "kl": lambda nats: f"{nats:.2e}",
    "output_error": lambda error: f"{error:.4f}",
    "index_bytes_per_token": lambda count: f"{count:,.1f}",
    "host_bytes_per_step": lambda count: f"{count / 1e6:,.2f}",
    "prefill_seconds": lambda seconds: f"{seconds:,.2f}",
    "ms_per_step": lambda ms: f"{ms:,.1f}",
}
PANELS = (("mass_ratio", "mass ratio to the oracle"), ("recall", "recall@K"), ("kl", "KL to dense, nats"))
"""The pictures side by side: quality against the budget."""

BASELINES = ("dense", "exact")
"""Drawn with broken lines."""


class Results:
    """Rows with the budgets that they were measured at, in the order of the measuring."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Row]] = []

    def add(self, budget: int, row: Row) -> None:
        self.rows.append((budget, row))

    def to_json(self) -> list[dict[str, Any]]:
        """The rows with exactly their documented fields."""
        return [row.to_dict() for _, row in self.rows]

    def tables(self) -> list[Table]:
        """A table for each budget."""
        budgets = dict.fromkeys(budget for budget, _ in self.rows)
        return [_table(budget, [row for at, row in self.rows if at == budget]) for budget in budgets]

    def draw(self, path: Path) -> None:
        """Each retriever's quality against the budget; ConfigError where the file cannot be written."""
        if not self.rows:
            return
        canvas = make_canvas()
        for plane, (name, title) in zip(canvas.figure.subplots(1, len(PANELS)), PANELS, strict=True):
            self._draw_panel(plane, name)
            plane.set(title=title, xlabel="rows per key/value head and step")
        canvas.figure.axes[0].legend()
        try:
            canvas.figure.savefig(path)
        except OSError as error:
            raise ConfigError(f"--plot {path}: cannot be written: {error}") from error

    def _draw_panel(self, plane: Any, name: str) -> None:
        for retriever in dict.fromkeys(row.retriever for _, row in self.rows):
            points = [(at, getattr(row, name)) for at, row in self.rows if row.retriever == retriever]
            points = sorted(point for point in points if point[1] is not None)
            if points:
                style = "--" if retriever in BASELINES else "-"
                plane.plot(*zip(*points, strict=True), marker="o", label=retriever, linestyle=style)
        budgets = sorted({budget for budget, _ in self.rows})
        plane.set_xscale("log", base=2)
        plane.set_xticks(budgets, [str(budget) for budget in budgets])
        plane.minorticks_off()
        plane.set_yscale("log" if name == "kl" else "linear")
        plane.grid(alpha=0.3)


def _table(budget: int, rows: Sequence[Row]) -> Table:
    table = Table(title=f"K = {budget} rows per key/value head and step", title_justify="left")
    for name in FIELDS:
        table.add_column(HEADS.get(name, name), justify="left" if name in TEXTS else "right", no_wrap=name in TEXTS)
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.to_dict().items()))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else CELLS.get(name, _share)(value)


def _share(value: float) -> str:
    return f"{value:.3f}"


def check_plot(path: Path) -> None:
    """Raise ConfigError where a picture could not be drawn or written, before anything is measured."""
    formats = make_canvas().get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot {path}: wanted a file that ends in one of {', '.join(sorted(formats))}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist; make it first")


def make_canvas(size: tuple[float, float] = (13, 4.2)) -> Any:
    """A figure's canvas, of a size in inches; ConfigError without matplotlib."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'pariskv[plots]'") from error
    return figure.Figure(figsize=size, layout="constrained").canvas
