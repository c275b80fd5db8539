"""What `pariskv new-plugin` writes, treated as its author would: built, installed, checked, run, uninstalled."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest
from fakes import registry_of

from pariskv.errors import ConfigError
from pariskv.new_plugin import FIELD, TAKEN, Names, create, names_of
from tests.packaging.fresh import Environment, build_sdist, build_wheel


@pytest.fixture(scope="module")
def plugin(installed: Environment) -> Path:
    """The new package, written by the installed command."""
    out = installed.run("pariskv", "new-plugin", "my-idea")
    assert "a retriever 'my-idea' that works" in out
    return installed.home / "pariskv-my-idea"


def test_it_is_complete(plugin: Path) -> None:
    files = {path.relative_to(plugin).as_posix() for path in plugin.rglob("*") if path.is_file()}
    assert files == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "my-idea.yaml",
        "pyproject.toml",
        "src/pariskv_my_idea/__init__.py",
        "src/pariskv_my_idea/py.typed",
        "src/pariskv_my_idea/retriever.py",
        "tests/test_retriever.py",
    }
    texts = [path.read_text(encoding="utf-8") for path in plugin.rglob("*") if path.is_file()]
    assert not [text for text in texts if FIELD.search(text)]


def test_it_passes_ruff_untouched(plugin: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "."]
        done = subprocess.run(ruff, cwd=plugin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


LONG = "a-name-that-is-as-long-as-names-may-be-4"


def test_so_do_plugins_of_other_names(tmp_path: Path) -> None:
    for name in ("q", "q2", "spread", "top-mass", "options-of-mine", "random-walk-2", LONG):
        create(names_of(name, registry_of()), tmp_path)
    test_it_passes_ruff_untouched(tmp_path)


def test_no_class_of_the_templates_imports_can_be_hidden() -> None:
    source = (files("pariskv.new_plugin") / "template/src/PACKAGE/retriever.py.tmpl").read_text(encoding="utf-8")
    tree = ast.parse(FIELD.sub("X", source))
    names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)} - {"X"}
    wanted = {name for name in names if name[0].isupper() and not name.isupper()}
    assert {Names(name).class_name for name in TAKEN} == wanted


def test_it_is_installed_passes_its_tests_and_mypy_and_goes_away(plugin: Path, installed: Environment) -> None:
    installed.install(build_wheel(plugin, plugin / "dist"))
    described = json.loads(installed.run("pariskv", "plugins", "my-idea", "--json"))
    assert described["distribution"] == "pariskv-my-idea"
    assert described["stages"] == ["allocate_codes", "encode", "coarse_select"]
    assert [option["name"] for option in described["options"]] == ["combine"]
    assert "my-idea.yaml: fine" in installed.run("pariskv", "config", "validate", "my-idea.yaml", cwd=plugin)

    passed = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=plugin)
    assert "9 passed" in passed
    installed.check_types(plugin)

    installed.pip("uninstall", "--yes", "pariskv-my-idea")
    gone = installed.run("pariskv", "plugins", "my-idea", check=False)
    assert "unknown retriever 'my-idea'" in gone


@pytest.mark.parametrize("name", ["", "My-Idea", "my_idea", "1st", "my--idea", "auto", "query", "../x", f"{LONG}1"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="wanted lower-case letters and digits, words joined by hyphens"):
        names_of(name, registry_of())


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"new-plugin coarse: pariskv .* offers a retriever of that name"):
        names_of("coarse", registry_of())


def test_the_packages_name_in_place_of_the_retrievers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"new-plugin pariskv-my-idea: .* give the retriever's name alone: my-idea"):
        names_of("pariskv-my-idea", registry_of())


def test_the_sdist_has_no_scratch_files(plugin: Path, tmp_path: Path) -> None:
    for name in ("scratch.txt", "LICENSE"):
        (plugin / name).touch()
    with tarfile.open(build_sdist(plugin, tmp_path)) as archive:
        files = {member.partition("/")[2] for member in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "my-idea.yaml", "tests/test_retriever.py"} <= files
    assert "scratch.txt" not in files


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "pariskv-my-idea"
    folder.mkdir()
    with pytest.raises(ConfigError, match="pariskv-my-idea: is there already; remove it, or choose another --into"):
        create(Names("my-idea"), tmp_path)
    assert list(folder.iterdir()) == []


def test_names_of_several_words() -> None:
    names = Names("random-walk-2")
    assert (names.distribution, names.package) == ("pariskv-random-walk-2", "pariskv_random_walk_2")
    assert names.class_name == "RandomWalk2"
