"""A new virtual environment, away from the checkout, in which wheels are installed as a user would.

What needs minutes to install (torch, transformers, the tools) is seen from the environment that runs the tests; pariskv
is not, for a path that a `.pth` file names brings no editable installations along.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPES = ROOT / ".mypy_cache" / "new-plugin"


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder to work in."""

    folder: Path
    home: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    def run(self, *command: str | Path, cwd: Path | None = None, check: bool = True) -> str:
        """Standard output of a command, the first word of which is looked up in the environment."""
        words = [str(self.bin / command[0]), *map(str, command[1:])]
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(words, cwd=cwd or self.home, env=environment, capture_output=True, text=True, check=False)
        if check:
            assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def pip(self, *arguments: str | Path) -> None:
        command = [*pip(), "--python", str(self.bin / "python"), *map(str, arguments), "--disable-pip-version-check"]
        done = subprocess.run(command, cwd=self.home, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, wheel: Path) -> None:
        """One wheel and nothing else; nothing is downloaded."""
        self.pip("install", "--no-index", "--no-deps", wheel)

    def check_types(self, project: Path) -> None:
        """mypy over a project, with a cache that stays: only the first run reads all of torch, and the others wait.

        Two that write at once would meet a locked database.
        """
        TYPES.mkdir(parents=True, exist_ok=True)
        with (TYPES / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert "Success" in self.run("python", "-m", "mypy", "--cache-dir", TYPES, cwd=project)


def pip() -> list[str]:
    """A pip that can work for another Python; `make` needs one, too."""
    for command in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["/usr/bin/python3", "-m", "pip"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "--version"], capture_output=True).returncode:
            return command
    pytest.skip("installing into a fresh environment needs pip")


def new_environment(folder: Path) -> Environment:
    (folder / "home").mkdir()
    venv.create(folder / "env", with_pip=False, symlinks=True)
    made = Environment(folder / "env", folder / "home")
    (made.site_packages / "tools.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return made


def build_wheel(project: Path, into: Path) -> Path:
    """The wheel of a project, built by hatchling in a process of its own."""
    return _build("build_wheel", project, into)


def build_sdist(project: Path, into: Path) -> Path:
    """The sdist of a project, likewise."""
    return _build("build_sdist", project, into)


def _build(hook: str, project: Path, into: Path) -> Path:
    pytest.importorskip("hatchling", reason=f"{hook} needs hatchling (the dev extra)")
    into.mkdir(parents=True, exist_ok=True)
    code = f"import sys; from hatchling.build import {hook}; print({hook}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(into)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.split()[-1]
