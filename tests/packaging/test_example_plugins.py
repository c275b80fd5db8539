"""The plugins in docs/examples, treated as their author would: built, installed, checked, run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.fresh import ROOT, Environment, build_wheel

EXAMPLES = ROOT / "docs" / "examples"
NAMES = ("pariskv-random-projection", "pariskv-stage-report")
PROMPT = " ".join(f"w{i % 90}" for i in range(150))
WINDOW = ("window.sink=4", "window.local=16", "window.update_interval=16", "window.dense_below=0")


@pytest.fixture(scope="module")
def plugins(installed: Environment) -> Path:
    """A folder with copies of the packages, which are installed in the fresh environment."""
    for name in NAMES:
        shutil.copytree(EXAMPLES / name, installed.home / name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        installed.install(build_wheel(installed.home / name, installed.home / name / "dist"))
    return installed.home


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()) == sorted(NAMES)


def test_they_pass_ruff() -> None:
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "docs/examples"]
        done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_they_pass_their_tests(plugins: Path, installed: Environment) -> None:
    folders = [plugins / name / "tests" for name in NAMES]
    assert "17 passed" in installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders)


@pytest.mark.parametrize("name", NAMES)
def test_they_pass_mypy(name: str, plugins: Path, installed: Environment) -> None:
    installed.check_types(plugins / name)


def test_pariskv_knows_them(plugins: Path, installed: Environment) -> None:
    listed = {row["name"]: row for row in json.loads(installed.run("pariskv", "plugins", "--json"))}
    assert listed["random-projection"]["distribution"] == NAMES[0]
    assert listed["random-projection"]["stages"] == ["allocate_codes", "encode", "encode_query", "coarse_select"]
    assert {"coarse_select", "fetch", "attend"} <= set(listed["stage-report"]["stages"])


def test_a_run_is_watched(plugins: Path, installed: Environment, tiny_folder: Path) -> None:
    (plugins / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    values = [f"model.name={tiny_folder}", "layers.default.top_k=8", "wrappers=[stage-report]", *WINDOW]
    config = plugins / NAMES[0] / "random-projection.yaml"
    options = ["--prompt-file", "prompt.txt", "--max-new-tokens", "6"]
    printed = installed.run("pariskv", "run", config, *options, *values)
    assert "tokens attended per step" in printed
    calls = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in printed.splitlines() if "│" in line}
    assert calls["coarse_select"] == calls["fetch"] == "15"  # 5 steps, 3 layers: no warm-up, no rehearsal
    assert "recall" in calls
