"""The charts of the landing page, from what was measured: bars in HTML, which follow the page's colours and width."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path

from pariskv.bench.output import read_json
from pariskv.units import show_tokens

DOCS = Path(__file__).resolve().parents[1]
SPEED = DOCS / "benchmarks" / "decode.json"
QUALITY = DOCS / "metrics.md"
BUDGET = "128, auto"
"""The rows of the table of `pariskv eval fidelity` that are drawn, by their first cell."""

Bar = tuple[str, float, str]
"""Class, length, and what is written at its end."""


def speed() -> str:
    """Milliseconds of whole decode steps, pariskv above dense attention."""
    result = read_json(SPEED)
    rows = [row for row in result.rows if row["ms"] is not None and row["dense_ms"] is not None]
    groups = [
        (
            f"{show_tokens(row['tokens'])} tokens",
            [
                ("ours", row["ms"], f"{row['ms']:.1f} ms, {row['ratio']:.2f} times as fast"),
                ("dense", row["dense_ms"], f"{row['dense_ms']:.1f} ms"),
            ],
        )
        for row in rows
    ]
    manifest = result.manifest
    source = f"{manifest['hardware']['gpu']}, torch {manifest['versions']['torch']}, {manifest['date'][:10]}"
    arguments = manifest["arguments"]
    about = (
        f"A random model of the shape {rows[0]['shape']}, captured steps; batch {rows[0]['batch']}, "
        f"top_k {arguments['top_k']}, store {rows[0]['store']}; {source}"
    )
    legend = '<span class="pk-key pk-ours">pariskv</span><span class="pk-key pk-dense">dense attention</span>'
    return chart(f"A whole decode step {legend}", groups, about)


def quality() -> str:
    """The attention that what was retrieved has, as a share of what the best choice of as many rows would have."""
    kinds = {"exact": "dense", "pariskv": "ours", "pariskv-paper": "paper"}
    found = sorted(mass_ratios().items(), key=lambda item: -item[1])
    groups = [(name, [(kinds[name], ratio, f"{ratio:.3f}")]) for name, ratio in found]
    return chart("Attention found, of what the 128 best tokens have", groups)


def mass_ratios() -> dict[str, float]:
    """By retriever, from the table on the page about metrics."""
    text = QUALITY.read_text(encoding="utf-8")
    (lines,) = re.findall(rf"^\| {re.escape(BUDGET)} \|.*\n(?:\| \|.*\n)*", text, flags=re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    return {row[1].strip("`"): float(row[4]) for row in cells}


def chart(title: str, groups: Iterable[tuple[str, list[Bar]]], about: str = "") -> str:
    groups = list(groups)
    longest = max(length for _, bars in groups for _, length, _ in bars)
    lines = [f'<figure class="pk-chart"><figcaption>{title}</figcaption>']
    for label, bars in groups:
        drawn = "".join(
            f'<div class="pk-bar"><i class="pk-{kind}" style="width:{60 * length / longest:.1f}%"></i>'
            f"<span>{html.escape(text)}</span></div>"
            for kind, length, text in bars
        )
        lines.append(f'<div class="pk-group"><b>{html.escape(label)}</b>{drawn}</div>')
    if about:
        lines.append(f"<small>{html.escape(about)}</small>")
    return "".join([*lines, "</figure>"])
