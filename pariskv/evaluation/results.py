"""What a measurement found: for machines (JSON), for a terminal (tables), as pictures, and as a page to look at."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from pariskv.bench.manifest import make_manifest
from pariskv.config import Config
from pariskv.evaluation.charts import Chart, write_charts

DEFINITIONS: Mapping[str, str] = {
    "candidate_recall": "of the K tokens that matter most, the share that was proposed to the rerank",
    "recall": "of the K tokens that matter most by the exact probabilities of all heads, the share that was fetched",
    "mass": "the share of all attention that falls on what was fetched",
    "oracle_mass": "the same share, had the best possible choice of as many rows been fetched",
    "mass_ratio": "mass over oracle mass: 1 where no other choice of as many rows has more attention",
    "output_error": "how far a layer's output is from dense attention's, relative to its length; 0 is the same",
    "kl": "Kullback-Leibler divergence of the next token's distribution from dense attention's, in nats; 0 is the same",
    "fetched": "distinct rows that are fetched for a key/value head at a step, the mean",
    "argmax_agreement": "how often the most probable next token is that of dense attention",
    "attended": "tokens that a query head attends to in a step, first and newest ones included",
    "start": "the mean of the first tenth of the positions",
    "end": "the mean of the last tenth of the positions",
    "slope": "of the least squares line through all positions",
    "needle": "a sentence with a number, hidden in repeated text; it is found where the answer has the number",
    "score": "the mean over items of the mean score of their answers (pass@1), from 0 to 100 %",
    "error": "the standard error of the score over items",
    "difference": "the score less dense attention's on the same items, and its 95 % interval by the paired bootstrap",
    "won": "items on which the retriever scores more than dense attention",
    "lost": "items on which it scores less",
    "p": "of McNemar's exact two-sided test: how likely wins and losses are as uneven where both are equally good",
    "cut": "answers that reached the limit of tokens before they ended",
    "too_long": "items whose prompt and answer do not fit the model's context: not asked, and in no score",
    "depth": "where the needle lies: 0 at the beginning of the text, 1 at its end",
}
"""The measures in words; the formulas are in docs/metrics.md."""

OF_THE_OUTPUT = {"as_json", "plot", "report"}
"""Arguments that do not change what is measured."""


@dataclass(frozen=True)
class Table:
    """Rows of texts under heads: numbers, but for the columns in `words`; the last `summed` rows sum up the others.

    long           columns of long texts, which a page lets go on in the next line
    only_on_pages  too much for a terminal
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    summed: int = 0
    words: Sequence[int] = (0,)
    long: Sequence[int] = ()
    only_on_pages: bool = False

    def as_rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=self.title, title_justify="left")
        for index, head in enumerate(self.heads):
            is_word = index in self.words
            table.add_column(head, justify="left" if is_word else "right", no_wrap=is_word)
        for index, row in enumerate(self.rows):
            if self.summed and index == len(self.rows) - self.summed:
                table.add_section()
            table.add_row(*row)
        return table


@dataclass(frozen=True)
class Results:
    """One run of one command.

    manifest  with what, where and when it ran
    found     what JSON has beside the manifest
    title     what was measured, in a few words
    headline  what came out, in a sentence
    figures   the numbers to look at first: (value, what it is)
    measures  the `DEFINITIONS` that a reader needs
    """

    manifest: Mapping[str, Any]
    found: Mapping[str, Any]
    title: str
    headline: str
    figures: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    measures: Sequence[str] = field(default_factory=tuple)

    def to_json(self) -> str:
        return json.dumps({"manifest": self.manifest, **self.found})

    def give(self, console: Console, as_json: bool, plot: Path | None, report: Path | None) -> None:
        """Print the tables or the JSON, and write the files that are asked for."""
        from pariskv.evaluation.page import write_page

        if as_json:
            print(self.to_json())
        else:
            for table in (one for one in self.tables if not one.only_on_pages):
                console.print(table.as_rich())
        if plot is not None and self.charts:
            write_charts(self.charts, plot)
        if report is not None:
            write_page(self, report)


def manifest_of(
    command: str, arguments: Mapping[str, Any], config: Config, calibration: str | None, **measured: Any
) -> dict[str, Any]:
    """The manifest of a benchmark, and `calibration`: the file of the model's query statistics, None without one."""
    plain = {key: _plain(value) for key, value in arguments.items()}
    found = make_manifest(command, plain, config)
    return {**found, "calibration": calibration, "measured": measured}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def command_line(manifest: Mapping[str, Any]) -> str:
    """The command that measures the same again."""
    arguments = {key: value for key, value in manifest["arguments"].items() if key not in OF_THE_OUTPUT}
    words = ["pariskv", *manifest["command"].split(), arguments.pop("config"), *(arguments.pop("overrides") or [])]
    for key, value in arguments.items():
        option = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False):
            for one in value if isinstance(value, list) else [value]:
                words += [option, str(one)]
    return shlex.join(words)


def number(value: float | None, digits: int = 4) -> str:
    """A number as a table shows it, `-` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}".replace("%", " %")
