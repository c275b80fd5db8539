"""The wrapper around the stages of a tiny model."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from pariskv.registry import Registry
from pariskv.testing import TinyRuns

from pariskv_stage_report import Report, StageReport

EXACT = {"retriever": "exact", "top_k": 8}


def watched(layer: dict[str, object], runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report of a run in which every layer is as given."""
    report, load = Report(), Registry.load

    def load_with_report() -> Registry:
        registry = load()
        (offer,) = registry.wrappers["stage-report"]
        registry.wrappers["stage-report"] = [replace(offer, factory=lambda: StageReport(report))]
        return registry

    monkeypatch.setattr(Registry, "load", load_with_report)
    runs.compare({"default": layer}, wrappers=["stage-report"])
    return report


def test_every_call_is_timed(tiny_runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = {"retriever": "pariskv", "candidates": 16, "top_k": 8}
    report = watched(layer, tiny_runs, monkeypatch)
    calls = 3 * (tiny_runs.new_tokens - 1)  # layers x steps
    for stage in ("encode_query", "coarse_select", "rerank", "fetch"):
        assert report.seconds[stage].count == calls
        assert report.seconds[stage].value > 0
    assert {"encode", "update", "attend"} <= report.seconds.keys()
    assert report.quality["recall"].count == 2 * calls  # rows


def test_the_oracle_finds_everything(tiny_runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    report = watched(EXACT, tiny_runs, monkeypatch)
    assert report.quality["recall"].mean == pytest.approx(1.0)
    assert report.quality["mass_ratio"].mean == pytest.approx(1.0)
    assert report.quality["fetched"].mean == 8


def test_a_blind_choice_does_not(tiny_runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    report = watched(
        {"retriever": "pariskv", "candidates": 8, "top_k": 8, "rerank": "none"},
        tiny_runs,
        monkeypatch,
    )
    assert 0.1 < report.quality["recall"].mean < 0.99


def test_the_tokens_are_those_without_it(tiny_runs: TinyRuns) -> None:
    assert tiny_runs.compare({"default": EXACT}, wrappers=["stage-report"]) == tiny_runs.compare(
        {"default": EXACT}
    )


def test_it_is_printed_when_the_cache_is_gone(
    tiny_runs: TinyRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.compare({"default": EXACT}, wrappers=["stage-report"])
    gc.collect()
    printed = capsys.readouterr().err
    assert "coarse_select" in printed
    assert "mass_ratio" in printed
    StageReport()
    assert capsys.readouterr().err == ""  # nothing was seen
