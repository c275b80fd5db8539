"""The needle grid on the default model: found with retrieval where dense attention finds it, and not without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pariskv.cli import main
from pariskv.evaluation.needle import Cell, draw
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model

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
        Cell(name, length, depth, length == 1000, 1)
        for length in (1000, 2000)
        for depth in (0.0, 1.0)
        for name in ("dense", "pariskv")
    ]
    path = tmp_path / "grid.svg"
    draw(cells, path)
    assert path.stat().st_size > 5000
