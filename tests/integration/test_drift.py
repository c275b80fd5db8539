"""Drift: the synthetic keys, the figures and their summary, a model's traces, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import language_model, prompt, tiny_model

from pariskv import parse_config
from pariskv.cli import main
from pariskv.decode import Batch
from pariskv.errors import ConfigError
from pariskv.evaluation.cli import only_layers
from pariskv.evaluation.drift import (
    Point,
    Synthetic,
    mean_points,
    measure_drift,
    model_traces,
    ratios_of,
    summarise,
    to_json,
    with_error,
)
from pariskv.registry import Registry

CONFIG = parse_config({"window": {"sink": 4, "local": 32, "update_interval": 32, "dense_below": 0}})


def test_the_keys_turn_by_ninety_degrees_with_a_mean_of_four_standard_deviations() -> None:
    made = Synthetic(steps=4000, prompt=4000, dim=64)
    trace = made.trace()
    before, after = trace.keys[0, 0, :4000], trace.keys[0, 0, -400:]
    assert float(before.mean(0).norm()) == pytest.approx(4, rel=0.1)
    assert float(after.mean(0).norm()) == pytest.approx(4, rel=0.15)
    cosine = torch.cosine_similarity(before.mean(0), after.mean(0), dim=0)
    assert abs(float(cosine)) < 0.2
    assert [float(keys.std(0)[d]) > 2.5 for keys in (before, after) for d in (0, 32)] == [True, False, False, True]
    assert trace.heads.shape == (4000, 1, 2, 4, 64)
    newest = trace.heads[-400:, 0, 0, 0]
    assert float(torch.cosine_similarity(newest.mean(0), after.mean(0), dim=0)) > 0.9


def test_what_is_learnt_once_from_the_prompt_loses_recall_and_analytic_codes_do_not() -> None:
    """A loose pin of the documented figures, on a twentieth of the steps."""
    made = Synthetic(steps=5000, prompt=3000)
    names = ["pqcache", "pariskv", "pariskv-paper", "exact"]
    traces = {0: (made.info(), made.trace())}
    found = {one.retriever: one for one in summarise(list(
        measure_drift(CONFIG, names, traces, 10, 4, Registry.load(entry_points=False))
    ))}  # fmt: skip
    assert list(found) == names
    assert found["exact"].start == found["exact"].end == pytest.approx(1)
    assert found["pqcache"].ratio < 0.5
    assert found["pariskv"].ratio > 0.9
    assert found["pariskv-paper"].ratio > 0.85
    assert found["pariskv"].end > found["pariskv-paper"].end + 0.1


def test_a_summary_is_of_the_first_and_last_tenth_and_the_least_squares_line() -> None:
    points = [Point("one", 1000 * (i + 1), 0.9 - 0.01 * i) for i in range(20)] + [Point("two", 1000, 0.5)]
    one, two = summarise(points)
    assert one.start == pytest.approx((0.9 + 0.89) / 2)
    assert one.end == pytest.approx((0.71 + 0.72) / 2)
    assert one.ratio == pytest.approx(one.end / one.start)
    assert one.slope == pytest.approx(-0.01)
    assert (two.start, two.end, two.ratio, two.slope) == (0.5, 0.5, 1.0, 0.0)
    plain = to_json(points)
    assert plain["rows"][0] == {"retriever": "one", "position": 1000, "recall": 0.9}  # type: ignore[index]
    assert set(plain["summary"][0]) == {"retriever", "start", "end", "ratio", "slope"}  # type: ignore[index]


def test_a_models_traces_are_its_prefill_from_which_every_layer_is_followed() -> None:
    model: Any = language_model(tiny_model("llama", torch.float32))
    model.encode = lambda prompts, chat="off": Batch(prompt(len(prompts[0]), seed=len(prompts[0])))
    traces = model_traces(model, "a" * 150, "b" * 130, 140, 120, chunk=64)
    info, trace = traces[0]
    assert (trace.prompt_tokens, trace.steps) == (140, 120)
    assert trace.keys.shape[2] == 260
    assert trace.prompt_queries is not None
    assert trace.prompt_queries.shape[2] == 140
    # The same queries and keys as one dense step after another sees them.
    from pariskv.integrations.reference import read_densely

    whole = torch.cat((prompt(150, seed=150)[:, :140], prompt(130, seed=130)[:, :120]), dim=1)
    stepped = read_densely(model, whole[:, :140], whole[:, 140:], 0).layers[0]
    torch.testing.assert_close(trace.heads, stepped.heads, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(trace.keys, stepped.keys, rtol=1e-3, atol=1e-4)
    points = list(measure_drift(CONFIG, ["exact"], traces, 5, 2, Registry.load(entry_points=False)))
    assert [point.position for point in points] == [24, 48, 72, 96, 120]
    assert all(point.recall == pytest.approx(1) for point in points)
    assert math.isclose(info.scaling, info.head_dim**-0.5)


def test_the_command_prints_rows_and_summary_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "one.yaml", tmp_path / "drift.svg"
    file.write_text("window: {sink: 4, local: 32, update_interval: 32, dense_below: 0}\n")
    arguments = [
        "--retrievers",
        "pariskv,window",
        "--synthetic",
        "--steps",
        "200",
        "--tokens",
        "400",
        "--positions",
        "4",
        "--tries",
        "2",
    ]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "drift", str(file), *arguments, "--json", "--plot", str(picture)])
    assert stopped.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"manifest", "rows", "summary"}
    assert [row["position"] for row in found["rows"]] == [50, 100, 150, 200] * 2
    assert [one["retriever"] for one in found["summary"]] == ["pariskv", "window"]
    assert found["summary"][1]["ratio"] == 0
    assert found["manifest"]["measured"]["ratios"]["window"] == [0, 0]
    ours = found["manifest"]["measured"]["ratios"]["pariskv"]
    assert len(set(ours)) == 2
    assert picture.read_text().lstrip().startswith("<?xml")
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "drift", str(file), "--retrievers", "pariskw", "--synthetic"])
    assert stopped.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "drift", str(file), "--retrievers", "pariskv", "--synthetic", "--layers", "1"])
    assert stopped.value.code == 2
    assert "--layers: got '1', but --synthetic has no model" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "drift", str(file), "--retrievers", "pariskv", "--tries", "2"])
    assert stopped.value.code == 2
    assert "--tries and --degrees are of made-up keys; add --synthetic" in capsys.readouterr().err


def test_layers_that_are_listed_are_followed_and_others_refused() -> None:
    assert only_layers([1, 4, 7], None) == [1, 4, 7]
    assert only_layers([1, 4, 7], "7, 1") == [7, 1]
    with pytest.raises(ConfigError, match="--layers: got '2', wanted one of 1, 4, 7"):
        only_layers([1, 4, 7], "1,2")


def test_layers_that_the_model_has_not_are_refused_before_it_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(f"model: {{name: {folder}}}\n")
    monkeypatch.setattr("pariskv.evaluation.drift.model_traces", None)
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "drift", str(file), "--retrievers", "pariskv", "--layers", "0,99"])
    assert stopped.value.code == 2
    assert "--layers: got '99', wanted one of 0" in capsys.readouterr().err


def test_tries_are_averaged_and_their_ratios_have_a_standard_error() -> None:
    tries = [[Point("one", 10, first), Point("one", 20, second)] for first, second in ((0.5, 0.4), (1.0, 0.6))]
    assert mean_points(tries) == [Point("one", 10, 0.75), Point("one", 20, 0.5)]
    ratios = ratios_of(tries)["one"]
    assert ratios == pytest.approx([0.8, 0.6])
    assert with_error(2 / 3, ratios) == "0.667 ± 0.100"
    assert with_error(0.8, [0.8]) == "0.800"


def test_keys_that_turn_by_no_degrees_stay_as_they_are_and_each_seed_has_its_own() -> None:
    still = Synthetic(steps=4000, prompt=4000, degrees=0).trace()
    before, after = still.keys[0, 0, :4000].mean(0), still.keys[0, 0, -4000:].mean(0)
    assert float(torch.cosine_similarity(before, after, dim=0)) > 0.99
    assert not torch.equal(Synthetic(steps=400, seed=1).trace().keys, Synthetic(steps=400, seed=2).trace().keys)
