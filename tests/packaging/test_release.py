"""What a release needs: one version everywhere, a workflow that says so, an sdist that the wheel can be built from."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import pariskv
from tests.packaging.fresh import ROOT, Environment, build_sdist, build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(ROOT, tmp_path_factory.mktemp("sdist"))


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == pariskv.__version__ == CITATION["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)
    assert "## [Unreleased]" in changelog
    assert PROJECT["version"] in released or f"What will be {PROJECT['version']}" in changelog


def test_the_citation_has_what_the_format_asks_for() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= CITATION.keys()
    assert all("name" in author or "family-names" in author for author in CITATION["authors"])
    assert CITATION["license"] == PROJECT["license"]


def test_the_workflow_publishes_as_a_trusted_publisher_what_it_has_tried() -> None:
    build, publish = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "with" not in publish["steps"][-1]  # no password
    commands = "\n".join(step.get("run", "") for step in build["steps"])
    for words in ("python -m build", "twine check", "pariskv plugins", "pytest"):
        assert words in commands


@pytest.mark.parametrize(("tag", "code"), [("v0.1.0", 0), ("v9.9.9", 1)])
def test_the_workflow_refuses_another_tag_than_the_version(tag: str, code: int, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "pariskv/__init__.py", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    version = PROJECT["version"]
    (tmp_path / "CHANGELOG.md").write_text(f"## [{version}] - 2026-12-31\n", encoding="utf-8")
    (check,) = [step["run"] for step in WORKFLOW["jobs"]["build"]["steps"] if "agree" in step.get("name", "")]
    name = tag.replace("0.1.0", version)
    done = subprocess.run(["sh", "-ec", check], cwd=tmp_path, env={"GITHUB_REF_NAME": name, "PATH": "/usr/bin:/bin"})
    assert done.returncode == code


def test_the_sdist_builds_the_same_wheel(sdist: Path, tmp_path: Path, installed: Environment) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for name in ("CITATION.cff", "CHANGELOG.md", "LICENSE", "README.md", "docs/tutorial.md", "tests/conftest.py"):
        assert (folder / name).is_file(), name
    assert not [path for path in folder.rglob("*") if path.name in ("__pycache__", "site", ".venv", ".mypy_cache")]
    (from_checkout,) = (installed.folder / "wheels").glob("*.whl")
    names = [set(zipfile.ZipFile(one).namelist()) for one in (build_wheel(folder, tmp_path / "dist"), from_checkout)]
    assert names[0] == names[1]


def test_the_wheel_needs_no_compiler(installed: Environment) -> None:
    (wheel,) = (installed.folder / "wheels").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: true" in archive.read(about).decode()
        assert not [name for name in archive.namelist() if name.endswith((".so", ".c", ".cpp", ".cu", ".pyx", ".rs"))]


def test_a_pipeline_runs_away_from_the_checkout(installed: Environment, tiny_folder: Path) -> None:
    """The wheel alone: the listing, a YAML file that mixes retrievers, an answer."""
    assert "pariskv-paper" in installed.run("pariskv", "plugins")
    config = installed.home / "mixed.yaml"
    config.write_text(
        f"model: {{name: '{tiny_folder}'}}\n"
        "layers: {default: {retriever: quest, top_k: 8}, 1: {retriever: exact, coarse_select: quest, candidates: 32}}\n"
        "retrievers: {quest: {page_size: 8}}\n"
        "window: {sink: 4, local: 16, update_interval: 16, dense_below: 0}\n",
        encoding="utf-8",
    )
    prompt = " ".join(f"w{i % 90}" for i in range(120))
    code = "from importlib.util import find_spec; print(find_spec('pariskv').origin)"
    assert str(installed.site_packages) in installed.run("python", "-c", code)
    printed = installed.run("pariskv", "run", config, "--prompt", prompt, "--max-new-tokens", "4", "--compare", "dense")
    assert "tokens attended per step" in printed
    assert "the texts" in printed


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(PROJECT["optional-dependencies"])
