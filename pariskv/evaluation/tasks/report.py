"""The answers of a run as tables, charts and a page: scores, classes, where a retriever and dense attention part."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pariskv.evaluation.charts import Chart
from pariskv.evaluation.results import Results, Table
from pariskv.evaluation.tasks.evaluation import DENSE, Record
from pariskv.evaluation.tasks.folder import RunFolder
from pariskv.evaluation.tasks.summary import Class, Row, by_class, classes_of, summarise

LONGEST = 240
"""Characters of an answer's end that the page shows."""

MOST = 100
"""Examples that the page shows; all answers are in the folder."""


def results_of(folder: RunFolder) -> Results:
    """What a run's folder says so far."""
    manifest, records = folder.manifest, in_order(folder)
    rows = summarise(records, {task["name"]: task["pass_at"] for task in manifest["run"]["tasks"]})
    classes = by_class(records, classes_of)
    names = list(dict.fromkeys(record.retriever for record in records))
    measures = ["score", "error", "difference", "won", "lost", "p", "cut", "too_long"]
    model = manifest["run"]["config"]["model"]["name"]
    protocol = manifest["run"]["settings"]["question"]
    return Results(
        manifest,
        {"rows": [row.to_dict() for row in rows], "classes": [asdict(one) for one in classes]},
        f"Benchmarks on {model}",
        f"{headline(rows, names)} The question is read {PROTOCOL[protocol]}.",
        [(percent(overall(rows, name)), f"{name}: mean of tasks") for name in names],
        [score_table(rows), *class_tables(classes, names), source_table(manifest), *disagreements(records)],
        charts(classes, names) if importlib.util.find_spec("matplotlib") else [],
        measures,
    )


PROTOCOL = {
    "dense": "densely, with the prompt (--question dense)",
    "sparse": "by decode steps, through the retriever (--question sparse)",
}


def in_order(folder: RunFolder) -> list[Record]:
    """The records as an unsharded, uninterrupted run writes them: by task, item, sample and retriever."""
    run = folder.manifest["run"]
    tasks = {task["name"]: index for index, task in enumerate(run["tasks"])}
    retrievers = {name: index for index, name in enumerate(run["settings"]["retrievers"])}
    found = folder.records.values()
    return sorted(found, key=lambda one: (tasks[one.task], retrievers[one.retriever], one.index, one.sample))


def overall(rows: Sequence[Row], retriever: str) -> float | None:
    """The mean of the tasks' scores, each counting the same; None where nothing was scored."""
    scores = [row.score for row in rows if row.retriever == retriever and row.score is not None]
    return sum(scores) / len(scores) if scores else None


def headline(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Who is how far from dense attention, in a sentence."""
    shown = [f"{name} {percent(overall(rows, name))}" for name in names]
    away = [row for row in rows if row.paired and not row.paired.interval[0] <= 0 <= row.paired.interval[1]]
    tasks = len({row.task for row in rows})
    differ = "; ".join(f"{row.retriever} on {row.task}" for row in away[:6])
    paired = any(row.paired for row in rows)
    verdict = f" Beyond noise from dense attention: {differ or 'none'}." if paired else ""
    return f"Mean score of {tasks} task{'s' * (tasks != 1)}: {', '.join(shown)}.{verdict}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def score_table(rows: Sequence[Row]) -> Table:
    """A line for each task and retriever."""
    ks = list(dict.fromkeys(name for row in rows for name in row.pass_at))
    heads = ("task", "retriever", "items", "samples", "score", "error", *ks, "difference", "95 %", "won", "lost", "p")
    return Table("Scores", (*heads, "cut", "too long"), [_cells(row, ks) for row in rows], words=(0, 1))


def _cells(row: Row, ks: Sequence[str]) -> list[str]:
    paired = row.paired
    against = ["-"] * 5
    if paired:
        low, high = (f"{100 * one:+.1f}" for one in paired.interval)
        p = "-" if paired.p is None else f"{paired.p:.3f}"
        against = [f"{100 * paired.difference:+.1f}", f"{low} to {high}", str(paired.won), str(paired.lost), p]
    return [
        row.task,
        row.retriever,
        str(row.items),
        str(row.samples),
        percent(row.score),
        "-" if row.error is None else f"{100 * row.error:.1f}",
        *(percent(row.pass_at.get(name)) for name in ks),
        *against,
        str(row.cut),
        str(row.too_long),
    ]


def class_tables(classes: Sequence[Class], names: Sequence[str]) -> list[Table]:
    """A table for each kind of class, the retrievers side by side."""
    return [_class_table(kind, classes, names) for kind in dict.fromkeys(one.kind for one in classes)]


def _class_table(kind: str, classes: Sequence[Class], names: Sequence[str]) -> Table:
    own = {(one.name, one.retriever): one for one in classes if one.kind == kind}
    rows = []
    for label in _labels(kind, classes):
        cells = [own.get((label, name)) for name in names]
        count = max(one.items for one in cells if one)
        rows.append([label, str(count), *(percent(one.score) if one else "-" for one in cells)])
    return Table(f"By {kind}", (kind, "items", *names), rows)


def _labels(kind: str, classes: Sequence[Class]) -> list[str]:
    found = dict.fromkeys(one.name for one in classes if one.kind == kind)
    is_size = kind in ("length", "position")
    return (
        sorted(found, key=lambda label: int(label.partition(" ")[0].replace(",", "").rstrip("%")))
        if is_size
        else list(found)
    )


def source_table(manifest: Mapping[str, Any]) -> Table:
    """Where each task comes from."""
    rows = []
    for task in manifest["run"]["tasks"]:
        source = task["source"]
        rows.append([task["name"], source["title"], source["version"], source["licence"], source["data"]])
    return Table("Sources", ("task", "benchmark", "version", "licence", "data"), rows, 0, range(5), (4,), True)


def disagreements(records: Sequence[Record]) -> list[Table]:
    """The answers that score otherwise than dense attention's."""
    dense = {(record.task, record.index, record.sample): record for record in records if record.retriever == DENSE}
    rows = []
    for record in records:
        other = dense.get((record.task, record.index, record.sample))
        if other is None or record.score is None or other.score is None or record.score == other.score:
            continue
        scores = f"{record.score:g} : {other.score:g}"
        wanted = ", ".join(record.wanted)
        rows.append([record.task, record.item, record.retriever, scores, wanted, _end(record), _end(other)])
    if not rows:
        return []
    shown = f"the first {MOST} of {len(rows)}" if len(rows) > MOST else str(len(rows))
    heads = ("task", "item", "retriever", "score : dense's", "wanted", "its answer's end", "dense attention's")
    title = f"Where a retriever and dense attention disagree: {shown}"
    return [Table(title, heads, rows[:MOST], 0, range(7), (4, 5, 6), True)]


def _end(record: Record) -> str:
    text = " ".join(record.answer.split())
    return text if len(text) <= LONGEST else f"... {text[-LONGEST:]}"


def charts(classes: Sequence[Class], names: Sequence[str]) -> list[Chart]:
    """Scores by length and by position, a line for each retriever."""
    found = []
    for kind, what in (("length", "Score by length"), ("position", "Score by where the answer lies")):
        own = [one for one in classes if one.kind == kind]
        if own:
            found.append(Chart(what, lambda figure, own=own, kind=kind: _draw(own, kind, names, figure)))  # type: ignore[misc]
    return found


def _draw(classes: Sequence[Class], kind: str, names: Sequence[str], figure: Any) -> None:
    axes = figure.subplots()
    labels = _labels(kind, classes)
    at = {(one.name, one.retriever): one for one in classes}
    for name in names:
        points = [(index, at[label, name]) for index, label in enumerate(labels) if (label, name) in at]
        heights = [100 * one.score for _, one in points]
        errors = [100 * (one.error or 0) for _, one in points]
        axes.errorbar([index for index, _ in points], heights, yerr=errors, marker="o", capsize=3, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="score in %, with standard errors", ylim=(-3, 103), xlabel=kind)
    axes.grid(visible=True)
    axes.legend()
