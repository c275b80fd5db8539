"""The development environment: pinned versions, `make` and what it says where it cannot work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    matches = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert None not in matches, "every line of constraints.txt is NAME==VERSION"
    return {match[1]: match[2] for match in matches if match}


LARGE = {"eval", "ray"}
"""Extras that the development environment leaves out: 80 MB and more that few tests need."""


def wanted() -> list[str]:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in extras if name not in LARGE for line in extras[name])]
    return [line for line in lines if not line.startswith("pariskv[")]


def test_every_requirement_is_pinned_to_a_version_that_satisfies_it() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    parsed = [requirements.Requirement(line) for line in wanted()]
    wrong = [str(need) for need in parsed if not need.specifier.contains(pins().get(need.name, "0"))]
    assert wrong == []


def test_the_pins_fit_what_the_kernels_and_a_cpu_can_use() -> None:
    # numba needs numpy below 2.5; torch 2.13.0 is the release that exists as a CPU build without CUDA packages.
    assert pins()["torch"] == "2.13.0"
    assert tuple(map(int, pins()["numpy"].split(".")[:2])) < (2, 5)
    assert not [name for name in pins() if name.startswith("nvidia")]


def test_the_model_wheel_is_no_dependency_of_ours() -> None:
    assert not [line for line in [*wanted(), *pins()] if line.startswith(("llm", "llama"))]


def test_ci_runs_the_tests_first_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make ")] == ["make test", "make lint", "make types", "make docs"]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@needs_make
def test_make_names_the_python_it_needs_where_it_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text(
        '#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$2"\n',
        encoding="utf-8",
    )
    old.chmod(0o755)
    done = make("env", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "is Python 3.9; pariskv needs 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


@needs_make
def test_make_says_so_where_there_is_no_python(tmp_path: Path) -> None:
    done = make("env", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "no-such-python is not here; install Python 3.11 or newer" in done.stderr


@needs_make
def test_make_without_a_target_lists_the_targets() -> None:
    listed = make().stdout
    assert [name for name in ("run", "test", "lint", "types", "docs", "clean") if f"make {name} " not in listed] == []
