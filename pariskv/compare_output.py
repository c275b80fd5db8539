"""What `pariskv compare` shows: rows as JSON, as tables, and quality against the budget as charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pariskv.compare import FIELDS, Row
from pariskv.evaluation.charts import Chart
from pariskv.evaluation.results import Results, Table, percent

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


Measured = Sequence[tuple[int, Row]]
"""Rows with the budgets that they were measured at, in the order of the measuring."""


def results_of(rows: Measured, manifest: Mapping[str, Any], title: str) -> Results:
    """A table for each budget, a chart for each of the `PANELS`, the rows with exactly their documented fields."""
    budgets = dict.fromkeys(budget for budget, _ in rows)
    least = min(budgets, default=0)
    own = [row for budget, row in rows if budget == least]
    figures = [(percent(row.mass_ratio), f"{row.retriever}: mass ratio at {least} rows") for row in own]
    return Results(
        manifest,
        {"rows": [row.to_dict() for _, row in rows]},
        title,
        f"{len(own)} retrievers on one prompt, given as many rows of keys and values, beside dense attention.",
        figures,
        [_table(budget, [row for at, row in rows if at == budget]) for budget in budgets],
        [Chart(label, partial(_draw, rows, name, label), (4.4, 4.2)) for name, label in PANELS] if rows else [],
        ("candidate_recall", "recall", "mass_ratio", "output_error", "kl", "argmax_agreement", "attended"),
    )


def _draw(rows: Measured, name: str, label: str, figure: Any) -> None:
    """Each retriever's quality against the budget."""
    plane = figure.subplots()
    for retriever in dict.fromkeys(row.retriever for _, row in rows):
        points = [(at, getattr(row, name)) for at, row in rows if row.retriever == retriever]
        points = sorted(point for point in points if point[1] is not None)
        if points:
            style = "--" if retriever in BASELINES else "-"
            plane.plot(*zip(*points, strict=True), marker="o", label=retriever, linestyle=style)
            plane.legend()
    budgets = sorted({budget for budget, _ in rows})
    plane.set_xscale("log", base=2)
    plane.set_xticks(budgets, [str(budget) for budget in budgets])
    plane.minorticks_off()
    plane.set_yscale("log" if name == "kl" else "linear")
    plane.set(title=label, xlabel="rows per key/value head and step")
    plane.grid(alpha=0.3)


def _table(budget: int, rows: Sequence[Row]) -> Table:
    return Table(
        f"K = {budget} rows per key/value head and step",
        [HEADS.get(name, name) for name in FIELDS],
        [[_cell(name, value) for name, value in row.to_dict().items()] for row in rows],
        words=[index for index, name in enumerate(FIELDS) if name in TEXTS],
    )


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else CELLS.get(name, _share)(value)


def _share(value: float) -> str:
    return f"{value:.3f}"
