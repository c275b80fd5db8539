"""Pages: one file that needs nothing else, valid, escaped, with every number and chart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from html_page import read_page

from pariskv import parse_config
from pariskv.errors import ConfigError
from pariskv.evaluation import drift, fidelity, needle
from pariskv.evaluation.charts import Chart, svg_of, write_charts
from pariskv.evaluation.page import check_report, page, write_page
from pariskv.evaluation.results import DEFINITIONS, Results, Table, command_line, manifest_of

EVIL = "<script>alert('x')</script>\"&"


def manifest(**arguments: Any) -> dict[str, Any]:
    given = {"config": Path("one.yaml"), "overrides": None, "as_json": False, **arguments}
    return manifest_of("eval drift", given, parse_config({}), "/cache/one.safetensors")


POINTS = [drift.Point(name, at, 0.9 - at / 4000) for name in ("pariskv", EVIL) for at in (100, 200, 300)]
CELLS = [
    needle.Cell(name, length, depth, int(length == 1000), 3)
    for length in (1000, 2000)
    for depth in (0.0, 1.0)
    for name in ("dense", EVIL)
]


@pytest.mark.parametrize(
    ("results", "charts", "numbers"),
    [
        (drift.results_of([POINTS], manifest(), EVIL), 1, ["0.875", "0.825", "0.943", "-0.25000", "0.850"]),
        (needle.results_of(CELLS, manifest(), EVIL), 2, ["1 of 3", "0 of 3", "2 of 12", "2,000"]),
    ],
    ids=["drift", "needle"],
)
def test_a_page_is_one_valid_file_with_every_number_and_chart(
    results: Results, charts: int, numbers: list[str]
) -> None:
    text = page(results)
    found = read_page(text)
    assert found.tags.count("svg") == found.tags.count("figure") == len(results.charts) == charts
    shown = " ".join(found.texts)
    assert all(number in shown for number in numbers)
    assert "/cache/one.safetensors" in shown
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text
    # Names are text, wherever they stand: title, headline, tables, charts.
    assert shown.count("<script>alert") >= 4
    assert "<script>" not in text


def test_texts_are_escaped_in_the_manifest_too() -> None:
    text = page(drift.results_of([POINTS[:3]], manifest(overrides=[f"a={EVIL}"]), "Drift"))
    read_page(text)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_heads_lead_to_definitions_in_words() -> None:
    found = read_page(page(drift.results_of([POINTS], manifest(), "Drift")))
    assert "#start" in found.links
    assert DEFINITIONS["start"] in " ".join(found.texts)


def test_every_measure_of_a_result_has_a_definition() -> None:
    for one in (fidelity.SUMMARY, fidelity.HEADS):
        assert set(one) <= set(DEFINITIONS)
    for made in (drift.results_of([POINTS], {}, ""), needle.results_of(CELLS, {}, "")):
        assert set(made.measures) <= set(DEFINITIONS)


def test_the_command_can_be_typed_again() -> None:
    given = {"retrievers": "a,b", "text_file": [Path("a b.txt")], "synthetic": True, "steps": None, "plot": "x.svg"}
    line = command_line(manifest(**given, overrides=["window.sink=4"]))
    assert line == "pariskv eval drift one.yaml window.sink=4 --retrievers a,b --text-file 'a b.txt' --synthetic"


def test_charts_take_the_colour_of_the_page_and_ids_of_their_own() -> None:
    chart = Chart("one", lambda figure: figure.subplots().plot([1, 2], [3, 4], marker="o"))
    first, second = svg_of(chart, "a-"), svg_of(chart, "b-")
    assert "currentColor" in first
    assert not {*re.findall(r' id="([^"]*)"', first)} & {*re.findall(r' id="([^"]*)"', second)}
    assert re.search(r' (width|height)="[\d.]+pt"', first) is None


def test_charts_share_one_file(tmp_path: Path) -> None:
    chart = Chart("one", lambda figure: figure.subplots().plot([1, 2], [3, 4]))
    write_charts([chart, chart], tmp_path / "two.svg")
    assert len(re.findall(r'id="axes_\d+"', (tmp_path / "two.svg").read_text())) == 2


def test_a_page_that_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--report .*page\.txt: wanted a file that ends in \.html"):
        check_report(tmp_path / "page.txt")
    with pytest.raises(ConfigError, match=r"--report .*: the folder .*none does not exist"):
        check_report(tmp_path / "none" / "page.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match=r"--report .*folder\.html: cannot be written"):
        write_page(drift.results_of([POINTS], manifest(), "Drift"), tmp_path / "folder.html")


def test_rows_that_sum_up_are_told_apart() -> None:
    made = Results(manifest(), {}, "one", "", [], [Table("t", ("a", "b"), [["x", "1"], ["all", "2"]], summed=1)], [])
    text = page(made)
    read_page(text)
    assert '<tr class="sum"><td class="word">all</td>' in text
