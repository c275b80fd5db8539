"""The site, built once for all tests of this folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages; the build is strict, so warnings fail it."""
    pytest.importorskip("mkdocs", reason="building the pages needs the docs extra")
    pytest.importorskip("mkdocstrings_handlers.python", reason="building the pages needs the docs extra")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).strip() == ""
    return folder


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
