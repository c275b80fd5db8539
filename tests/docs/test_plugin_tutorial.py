"""The tutorial: its blocks are slices of the example's files, its commands run on the default model."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pariskv.cli import main
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model
from pariskv.new_plugin import Names, create
from tests.docs.fences import ROOT, Block, blocks

EXAMPLES = ROOT / "docs" / "examples"
NAME = "pariskv-random-projection"
SLICES = [block for block in blocks("tutorial") if block.title]
COMMANDS = [line for block in blocks("tutorial", "bash") for line in block.text.splitlines()]

PACKAGING = {
    "pip install -e '.[dev]'",
    "pip install ../pariskv/docs/examples/pariskv-stage-report",
    "pytest",
    "ruff check .",
    "ruff format .",
    "mypy",
}
"""Done by tests/packaging/test_example_plugins.py, in an environment of its own."""

BUILD = {"pip install build", "python -m build"}
"""Done there by hatchling, which is what `build` calls."""

SHORT = ("quickstart.prompt_tokens=250", "generation.max_new_tokens=2")
QUICK = {"run": SHORT, "compare": SHORT, "eval": ("--tokens", "250", "--steps", "1")}
"""What makes a command quick; the last of an option's values counts."""


def is_slice(text: str, of: str) -> bool:
    """Whether the text is some successive lines of a file."""
    lines, count = of.splitlines(), len(text.splitlines())
    parts = ("\n".join(lines[start : start + count]) for start in range(len(lines) - count + 1))
    return any(textwrap.dedent(part).strip() == textwrap.dedent(text).strip() for part in parts)


@pytest.mark.parametrize("block", SLICES, ids=[f"{i}-{block.title}" for i, block in enumerate(SLICES)])
def test_every_titled_block_is_a_slice_of_the_example(block: Block) -> None:
    assert is_slice(block.text, (EXAMPLES / NAME / block.title).read_text(encoding="utf-8"))


def test_every_block_of_code_has_a_title_or_is_a_command() -> None:
    assert {block.language for block in blocks("tutorial") if not block.title} == {"bash"}
    assert len(SLICES) >= 10


def test_a_changed_line_is_no_slice() -> None:
    assert is_slice("  b\n  c\n", "a\n  b\n  c\n")
    assert not is_slice("b\nC\n", "a\n  b\n  c\n")


@pytest.fixture
def assembled(tmp_path: Path) -> Path:
    """A new package with the page's blocks in it, one below another, as a reader would paste them; ruff formats."""
    (folder, *_) = create(Names("random-projection"), tmp_path)
    shown: dict[str, str] = {}
    for block in SLICES:
        shown[block.title] = shown.get(block.title, "") + block.text
    del shown["pyproject.toml"]  # the template's own
    for title, text in shown.items():
        (folder / title).write_text(text, encoding="utf-8")
    for command in (["format"], ["check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_blocks_make_the_example_of_a_new_package_and_pass_its_tests(assembled: Path, tmp_path: Path) -> None:
    for file in assembled.rglob("*.py"):
        wanted = EXAMPLES / NAME / file.relative_to(assembled)
        assert file.read_text(encoding="utf-8") == wanted.read_text(encoding="utf-8")
    lay_out(tmp_path / "site", assembled)
    path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pariskv.testing.fixtures"]
    done = subprocess.run(run, cwd=assembled, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def lay_out(folder: Path, source: Path) -> None:
    """A distribution of a package's folder as pip would leave it, without pip."""
    package = source.name
    module = package.replace("-", "_")
    shutil.copytree(source / "src" / module, folder / module)
    info = folder / f"{module}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n", encoding="utf-8")
    entry = f"[pariskv]\n{package.removeprefix('pariskv-')} = {module}\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def pariskv(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0, arguments


@pytest.mark.model
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are written, but on a shorter prompt; the package that is generated gives way to the finished example."""
    if local_path(resolve_model(DEFAULT_MODEL)) is None:
        pytest.skip("the default model is not here: pariskv model fetch smollm2-135m")
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS:
        words = shlex.split(line)
        if words[:2] == ["pariskv", "new-plugin"]:
            pariskv(words[1:])
            shutil.copytree(EXAMPLES / NAME, tmp_path / NAME, dirs_exist_ok=True)
            for package in (NAME, "pariskv-stage-report"):
                lay_out(tmp_path / "site", EXAMPLES / package)
            monkeypatch.syspath_prepend(tmp_path / "site")
        elif words[0] == "cd":
            monkeypatch.chdir(words[1])
        elif words[0] == "pariskv":
            pariskv([*words[1:], *QUICK.get(words[1], ())])
        else:
            assert line in PACKAGING | BUILD
    gc.collect()  # the report comes when the cache is gone
    printed = capsys.readouterr()
    assert "needle test" in printed.out
    assert "recall@K" in printed.out
    assert "layer 29  attend" in printed.err
    assert "candidate_recall" in printed.err


def test_the_example_began_as_the_template(tmp_path: Path) -> None:
    names = Names("random-projection")
    (folder, *files) = create(names, tmp_path)
    left_out = {".gitignore", ".github/workflows/ci.yml"}
    wanted = {file.relative_to(folder).as_posix() for file in files} - left_out
    here = {file.relative_to(EXAMPLES / NAME).as_posix() for file in (EXAMPLES / NAME).rglob("*") if file.is_file()}
    caches = {name for name in here if name.startswith(".") or "__pycache__" in name}
    assert here - caches == wanted | {"mixed.yaml"}
