"""Charts by matplotlib: all of a result in one file (`--plot`), or each as a part of a page (`--report`)."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pariskv.errors import ConfigError

INK = "#010203"
"""Stands for the colour of text and axes; a page replaces it by its own, which may be light on dark."""

STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.facecolor": "none",
    "legend.framealpha": 0,
    "grid.alpha": 0.2,
    "svg.fonttype": "none",
    "text.parse_math": False,
    **{
        f"{part}color": INK
        for part in ("text.", "axes.label", "axes.edge", "axes.title", "xtick.", "ytick.", "grid.", "legend.label")
    },
}


@dataclass(frozen=True)
class Chart:
    """A picture that is drawn when it is asked for.

    title  what it shows, in words
    draw   draws it onto an empty figure of matplotlib's
    size   in inches
    """

    title: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (6.4, 4.0)


def check_plot(path: Path) -> None:
    """Raise ConfigError where a picture could not be drawn or written, before anything is measured."""
    formats = make_figure("--plot").canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot {path}: wanted a file that ends in one of {', '.join(sorted(formats))}")
    check_folder("--plot", path)


def check_folder(option: str, path: Path) -> None:
    """Raise ConfigError where the folder of a file is not there."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.absolute().parent} does not exist; make it first")


def make_figure(option: str, size: tuple[float, float] = (6.4, 4.0)) -> Any:
    """An empty figure, of a size in inches; ConfigError without matplotlib."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"{option} needs matplotlib: pip install 'pariskv[plots]'") from error
    return figure.Figure(figsize=size, layout="constrained")


def write_charts(charts: Sequence[Chart], path: Path) -> None:
    """All charts side by side in one file; ConfigError where it cannot be written."""
    size = sum(chart.size[0] for chart in charts), max(chart.size[1] for chart in charts)
    figure = make_figure("--plot", size)
    parts = figure.subfigures(1, len(charts), squeeze=False, width_ratios=[chart.size[0] for chart in charts])[0]
    for chart, part in zip(charts, parts, strict=True):
        chart.draw(part)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error}") from error


def svg_of(chart: Chart, prefix: str) -> str:
    """The chart as an `<svg>` element for a page: as wide as its place, in the page's colour of text.

    prefix  of every id in it, so that several charts can be on one page
    """
    figure = make_figure("--report", chart.size)  # the error first, where there is no matplotlib
    text = io.StringIO()
    with importlib.import_module("matplotlib").rc_context(STYLE):
        figure = make_figure("--report", chart.size)
        chart.draw(figure)
        figure.savefig(text, format="svg")
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for unwanted in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r' xmlns(:\w+)?="[^"]*"'):
        svg = re.sub(unwanted, "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    opening = re.sub(r' (width|height|version)="[^"]*"', "", svg[: svg.index(">")])
    return f'{opening} role="img" aria-label="{escape(chart.title)}"{svg[svg.index(">") :]}'
