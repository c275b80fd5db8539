"""The needle grid on the default model: found with retrieval where dense attention finds it, and not without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_models import language_model, tiny_model

from pariskv import parse_config
from pariskv.cli import main
from pariskv.errors import CapacityError
from pariskv.evaluation.charts import write_charts
from pariskv.evaluation.needle import Cell, measure_needles, results_of
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model
from pariskv.registry import Registry

CONFIG = """
layers: {default: {retriever: pariskv, top_k: 128}}
window: {sink: 4, local: 64, update_interval: 64, dense_below: 0}
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "needle", *arguments])
    out = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out.out, out.err


def test_retrieval_finds_the_needle_where_dense_attention_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if local_path(resolve_model(DEFAULT_MODEL)) is None:
        pytest.skip("the default model is not on this machine: make model")
    file = tmp_path / "one.yaml"
    file.write_text(CONFIG)
    sizes = ["--lengths", "1200", "--depths", "0.5", "--retrievers", "pariskv,window", "--json"]
    code, out, _ = run(capsys, str(file), *sizes)
    assert code == 0
    found = json.loads(out)
    assert set(found) == {"manifest", "rows"}
    common = {"length": 1200, "depth": 0.5, "tries": 1}
    assert found["rows"] == [
        {"retriever": "dense", **common, "found": 1},
        {"retriever": "pariskv", **common, "found": 1},
        {"retriever": "window", **common, "found": 0},
    ]


@pytest.mark.parametrize("depths", ["2", "deep", "-0.1"])
def test_a_depth_outside_of_the_text_is_refused(
    depths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(CONFIG)
    code, _, error = run(capsys, str(file), f"--depths={depths}")
    assert code == 2
    assert f"--depths: got '{depths}', wanted a number from 0 (the beginning) to 1 (the end)" in error


def test_the_heat_maps_show_every_cell(tmp_path: Path) -> None:
    cells = [
        Cell(name, length, depth, int(length == 1000), 1)
        for length in (1000, 2000)
        for depth in (0.0, 1.0)
        for name in ("dense", "pariskv")
    ]
    path = tmp_path / "grid.svg"
    results = results_of(cells, {}, "Needles")
    write_charts(results.charts, path)
    assert len(re.findall(r'id="axes_\d+"', path.read_text())) == 2
    assert [table.rows for table in results.tables] == [[["0", "1 of 1", "0 of 1"], ["1", "1 of 1", "0 of 1"]]] * 2
    assert "dense 2 of 4; pariskv 2 of 4" in results.headline


def test_prompts_beyond_the_models_context_are_refused() -> None:
    model = language_model(tiny_model("llama", torch.float32))
    model.context_length = 4000
    with pytest.raises(CapacityError, match=r"\(--lengths\) has 4000 tokens and 16 are decoded .* give it 3984"):
        list(measure_needles(model, parse_config({}), ["pariskv"], [1000, 4000], [0.5], 1, Registry.load()))
