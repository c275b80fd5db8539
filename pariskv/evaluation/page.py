"""A result as one HTML file that needs nothing else: numbers, charts, tables, definitions, how to measure it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pariskv.errors import ConfigError
from pariskv.evaluation.charts import check_folder, make_figure, svg_of
from pariskv.evaluation.results import DEFINITIONS, Results, Table, command_line

CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5d6570; --line: #d9dde2; --paper: #fff; --card: #f4f6f8;
  --link: #0b57a4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ad; --line: #343a41; --paper: #15181b;
  --card: #1e2226; --link: #7cb8f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
a { color: var(--link); text-underline-offset: .15em; }
.when { color: var(--soft); margin: .25rem 0 1rem; }
.headline { font-size: 1.1rem; max-width: 46rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; padding: 0;
  list-style: none; }
.figures li { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; }
.figures b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--soft); font-size: .875rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th.word, td.word { text-align: left; }
td.long { white-space: normal; min-width: 14rem; vertical-align: top; overflow-wrap: anywhere; }
tr.sum td { font-weight: 600; }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0; color: var(--soft); }
code, pre { font: .8125rem/1.45 ui-monospace, monospace; }
pre { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; overflow-x: auto; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
"""


MEASURE_OF = {"candidates": "candidate_recall", "recall@K": "recall", "KL": "kl", "argmax": "argmax_agreement"}
"""Heads of tables that are shorter than what they are called."""


class Markup(str):
    """Text that is HTML already; every other text is escaped where it becomes part of an element."""


def element(name: str, *content: str, **attributes: str) -> Markup:
    """An element with its content; `class_` is the attribute class."""
    given = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    inner = "".join(one if isinstance(one, Markup) else escape(one) for one in content)
    return Markup(f"<{name}{given}>{inner}</{name}>")


def check_report(path: Path) -> None:
    """Raise ConfigError where a page could not be made or written, before anything is measured."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--report {path}: wanted a file that ends in .html")
    check_folder("--report", path)
    make_figure("--report")


def write_page(results: Results, path: Path) -> None:
    """Write the page; ConfigError where that cannot be."""
    try:
        path.write_text(page(results), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path}: cannot be written: {error}") from error


def page(results: Results) -> str:
    """The whole page."""
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", results.title),
        element("style", Markup(CSS)),
    )
    parts = [*_opening(results), *_charts(results)]
    for table in results.tables:
        parts += [element("h2", table.title), element("div", _table(table, results.measures), class_="wide")]
    parts += [*_definitions(results), *_manifest(results.manifest)]
    body = element("body", element("main", *parts))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _opening(results: Results) -> list[Markup]:
    hardware = results.manifest["hardware"]
    where = hardware["gpu"] or f"{hardware['cores']} cores of {hardware['cpu']}"
    figures = [element("li", element("b", value), element("span", what)) for value, what in results.figures]
    return [
        element("h1", results.title),
        element("p", f"{results.manifest['date'][:10]}, {where}", class_="when"),
        element("p", results.headline, class_="headline"),
        element("ul", *figures, class_="figures"),
    ]


def _charts(results: Results) -> list[Markup]:
    figures = [
        element("figure", element("figcaption", chart.title), Markup(svg_of(chart, f"chart{index}-")))
        for index, chart in enumerate(results.charts)
    ]
    return [element("div", *figures, class_="charts")]


def _table(table: Table, measures: Sequence[str]) -> Markup:
    """The table; heads that are measures lead to their definitions."""

    def cell(name: str, index: int, content: str) -> Markup:
        kind = "word" if index in table.words else "number"
        return element(name, content, class_=f"{kind} long" if index in table.long else kind)

    heads = [cell("th", index, _linked(head, measures)) for index, head in enumerate(table.heads)]
    rows = []
    for number, row in enumerate(table.rows):
        is_sum = number >= len(table.rows) - table.summed
        cells = [cell("td", index, content) for index, content in enumerate(row)]
        rows.append(element("tr", *cells, class_="sum" if is_sum else "one"))
    return element("table", element("thead", element("tr", *heads)), element("tbody", *rows))


def _linked(head: str, measures: Sequence[str]) -> str:
    name = MEASURE_OF.get(head, head.replace(" ", "_"))
    return element("a", head, href=f"#{name}") if name in measures else head


def _definitions(results: Results) -> list[Markup]:
    terms = [
        part
        for name in results.measures
        for part in (element("dt", name.replace("_", " "), id=name), element("dd", DEFINITIONS[name]))
    ]
    return [element("h2", "What the words mean"), element("dl", *terms)]


def _manifest(manifest: Mapping[str, Any]) -> list[Markup]:
    hardware, versions = manifest["hardware"], manifest["versions"]
    machine = {key: value for key, value in hardware.items() if value is not None}
    rows = {
        "date": manifest["date"],
        "hardware": ", ".join(f"{key} {value}" for key, value in machine.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": manifest["git"] or "-",
        "calibration": manifest["calibration"] or "none",
    }
    terms = [part for name, value in rows.items() for part in (element("dt", name), element("dd", value))]
    rest = {key: manifest[key] for key in ("arguments", "config", "measured")}
    return [
        element("h2", "How to measure it again"),
        element("pre", command_line(manifest), class_="command"),
        element("dl", *terms),
        element(
            "details",
            element("summary", "arguments, configuration and what was measured besides"),
            element("pre", json.dumps(rest, indent=1, ensure_ascii=False)),
        ),
    ]
