"""The file of a prefix: cut off, tampered with, on a full disk, and a save that is killed in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefix_cases as cases
import pytest
import torch
from prefix_cases import a_model, config_of, continued, read, saved
from safetensors import safe_open

from pariskv.errors import PrefixError
from pariskv.prefix import atomic, load_prefix, prefix_info, save_prefix
from pariskv.prefix.file import PrefixFile, write_file
from pariskv.prefix.parts import PIECE, Part, tensor_part

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("ragged", tmp_path_factory.mktemp("good"))


def refusal(path: Path) -> str:
    """How loading refuses the file."""
    with pytest.raises(PrefixError) as refused:
        load_prefix(path, a_model("ragged"), config_of("ragged"))
    assert str(path) in str(refused.value)
    return str(refused.value)


def names_of(path: Path) -> list[str]:
    with PrefixFile.open(path) as file:
        return sorted(file.tensors)


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """The file with its head changed: change(head, our header) in place; the header's digest is made to fit again."""
    raw = source.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    metadata = head["__metadata__"]
    header = json.loads(metadata["header"])
    change(head, header)
    metadata["header"] = json.dumps(header, sort_keys=True)
    metadata["sha256"] = hashlib.sha256(metadata["header"].encode()).hexdigest()
    body = json.dumps(head).encode()
    body += b" " * (-len(body) % 8)
    target.write_bytes(len(body).to_bytes(8, "little") + body + raw[8 + size :])
    return target


# What is in it


def test_it_is_a_safetensors_file_without_pickle(good: Path) -> None:
    with safe_open(good, framework="pt") as file:
        metadata = file.metadata()
        assert metadata["format"] == "pariskv-prefix"
        assert metadata["version"] == "1"
        found = set(file.keys())
    kinds = {".".join(part for part in name.split(".") if not part.isdecimal()) for name in found}
    rows = {"layers.steady", "layers.zone"}
    codes = {f"layers.codes.pariskv.{field}" for field in ("signs", "codes", "weights", "counts", "norms")}
    assert rows | codes | {"tokens", "logits", "layers.queries.moment", "layers.queries.recent"} < kinds
    sources = [*(ROOT / "pariskv/prefix").glob("*.py"), ROOT / "pariskv/integrations/cache_parts.py"]
    assert len(sources) > 5
    assert not [path for path in sources if "pickle" in (text := path.read_text()) or "torch.load" in text]


def test_the_header_says_what_the_prefix_belongs_to(good: Path) -> None:
    info = prefix_info(good)
    assert info.held["rows"] == [150, 61, 3]
    assert info.belongs["model"]["dtype"] == "float32"
    assert info.belongs["retrievers"]["pariskv"]["options"]["seed"] == 42
    assert info.belongs["layers"]["0"]["window"] == {"sink": 4, "local": 8, "update": 8, "dense_below": 0}
    assert info.bytes == good.stat().st_size


def test_a_large_tensor_comes_in_pieces_and_goes_back(tmp_path: Path) -> None:
    big = torch.randint(0, 255, (3 * PIECE + 5,), dtype=torch.uint8)
    odd, none = torch.randn(7, 3, dtype=torch.float64), torch.empty(4, 0)
    whole = {"big": big, "odd": odd, "none": none, "flags": torch.tensor([True, False, True])}
    digest = write_file(tmp_path / "a.safetensors", {"x": 1}, [tensor_part(*item) for item in whole.items()])
    room = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with PrefixFile.open(tmp_path / "a.safetensors") as file:
        assert file.sha256 == digest
        assert file.header == {"x": 1}
        file.fill(lambda: [tensor_part(*item) for item in room.items()])
    assert all(torch.equal(room[name], tensor) for name, tensor in whole.items())


def test_a_type_that_the_format_lacks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PrefixError, match=r"layers\.0\.state\.x: a tensor \[2\] of torch\.complex64 cannot be saved"):
        write_file(tmp_path / "a.safetensors", {}, [tensor_part("layers.0.state.x", torch.zeros(2) * 1j)])
    assert list(tmp_path.iterdir()) == []


# Damage


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_a_file_that_is_cut_off_is_refused(keep: float, good: Path, tmp_path: Path) -> None:
    raw = good.read_bytes()
    cut = raw[: int(keep * len(raw))] if isinstance(keep, float) else raw[:keep]
    (tmp_path / "cut.safetensors").write_bytes(cut)
    assert "length or head: the file is cut off, or no safetensors file" in refusal(tmp_path / "cut.safetensors")


def test_a_file_that_goes_on_is_refused(good: Path, tmp_path: Path) -> None:
    (tmp_path / "long.safetensors").write_bytes(good.read_bytes() + b"\0")
    assert "length or head" in refusal(tmp_path / "long.safetensors")


def test_a_changed_bit_of_any_tensor_is_refused_by_the_tensors_name(good: Path, tmp_path: Path) -> None:
    raw, path = bytearray(good.read_bytes()), tmp_path / "bit.safetensors"
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    kinds: dict[str, str] = {}
    for name in names_of(good):
        kinds[".".join(part for part in name.split(".") if not part.isdecimal())] = name
    assert len(kinds) > 12
    for name in kinds.values():
        start, stop = head[name]["data_offsets"]
        place = 8 + size + (start + stop) // 2
        raw[place] ^= 16
        path.write_bytes(raw)
        assert f"{name}: was changed after it was written" in refusal(path)
        raw[place] ^= 16
    path.write_bytes(raw)
    load_prefix(path, a_model("ragged"), config_of("ragged"))


def test_a_changed_header_is_refused(good: Path, tmp_path: Path) -> None:
    raw = good.read_bytes()
    for old, new in ((b'\\"seed\\": 42', b'\\"seed\\": 43'), (b"fingerprint", b"fingerprant")):
        assert raw.count(old) >= 1
        (tmp_path / "header.safetensors").write_bytes(raw.replace(old, new))
        assert "header: was changed after it was written" in refusal(tmp_path / "header.safetensors")


def first_tensor(head: dict[str, Any]) -> str:
    return next(name for name in head if name.startswith("layers."))


FORGED: dict[str, tuple[Any, str]] = {
    "format": (lambda head, header: head["__metadata__"].update(format="other"), "format: wanted pariskv-prefix"),
    "version": (
        lambda head, header: head["__metadata__"].update(version="2"),
        "version: this pariskv reads pariskv-prefix 1, got pariskv-prefix 2",
    ),
    "no header": (lambda head, header: header.clear(), "header: cannot be understood"),
    "no lengths": (lambda head, header: header["held"].pop("rows"), "header: cannot be understood"),
    "layers": (lambda head, header: header["held"]["layers"].pop("1"), "header: cannot be understood"),
    "a tensor fewer": (lambda head, header: header["tensors"].pop("logits"), "logits: is not in the header"),
    "another shape": (
        lambda head, header: header["tensors"]["logits"][1].reverse(),
        "logits: wanted F32 [97, 3], got F32 [3, 97]",
    ),
    "other zones": (
        lambda head, header: header["held"]["layers"]["0"].update(zones=[128, 48, 0]),
        "layers.0.",
    ),
    "a number in the header": (
        lambda head, header: header["held"].update(tokens="0" * 64),
        "tokens: the token ids are not those of the header",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_is_refused_by_name(name: str, good: Path, tmp_path: Path) -> None:
    change, message = FORGED[name]
    assert message in refusal(rewritten(good, tmp_path / "forged.safetensors", change))


def test_a_forged_file_has_another_digest(good: Path, tmp_path: Path) -> None:
    forged = rewritten(good, tmp_path / "forged.safetensors", lambda head, header: header["held"].update(tail="!"))
    load_prefix(forged, a_model("ragged"), config_of("ragged"))  # it fits: only its author can tell
    with pytest.raises(PrefixError, match="sha256: wanted"):
        load_prefix(forged, a_model("ragged"), config_of("ragged"), sha256=prefix_info(good).sha256)


def test_what_is_no_prefix_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    assert "no such file" in refusal(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "weights.safetensors")
    assert "format: wanted pariskv-prefix, got no format" in refusal(tmp_path / "weights.safetensors")
    assert "length or head" in refusal(tmp_path)


# A disk that is full, a process that dies


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("ragged", tmp_path)
    before = path.read_bytes()
    model, prefix = read("ragged")
    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "fsync", lambda descriptor: full())
        with pytest.raises(
            PrefixError, match=r"cannot be written: No space left on device; the file there is as it was"
        ):
            save_prefix(path, prefix, model)
    assert leftovers(tmp_path) == ["ragged.safetensors"]
    assert path.read_bytes() == before
    save_prefix(path, prefix, model)  # the cache is as it was, too
    assert continued("ragged", model, load_prefix(path, model, config_of("ragged")))


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_beyond_what_the_system_allows_leaves_nothing(tmp_path: Path) -> None:
    """A real refusal of the kernel, at a megabyte (RLIMIT_FSIZE)."""
    code = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from pariskv.prefix.file import write_file\n"
        "from pariskv.prefix.parts import tensor_part\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "write_file(Path(sys.argv[1]), {}, [tensor_part('a', torch.zeros(1 << 22))])\n"
    )
    done = run_python(code, tmp_path / "a.safetensors")
    assert "PrefixError" in done.stderr
    assert "cannot be written: File too large; nothing is left of it" in done.stderr
    assert leftovers(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_refused_before_and_while_it_is_written_to(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [tensor_part("a", torch.zeros(1 << 22))]
    with pytest.raises(PrefixError, match=r"the prefix takes 16\.8 MB, 1\.0 MB are free there; make room"):
        write_file(tiny_disk / "a.safetensors", {}, parts)
    assert leftovers(tiny_disk) == []
    monkeypatch.setattr(atomic, "refuse_full_disk", lambda *_: None)  # another process was faster
    with pytest.raises(PrefixError, match="cannot be written: No space left on device; nothing is left of it"):
        write_file(tiny_disk / "a.safetensors", {}, parts)
    assert leftovers(tiny_disk) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PrefixError, match="cannot be written: No such file or directory"):
        write_file(tmp_path / "no" / "a.safetensors", {}, [])


HALF = """
import sys, time, torch
from pathlib import Path
from pariskv.prefix.file import write_file
from pariskv.prefix.parts import PIECE, Part

def read(start, stop):
    if start >= 2 * PIECE:
        print("half", flush=True)
        time.sleep(600)
    return torch.full((stop - start,), 7, dtype=torch.uint8)

write_file(Path(sys.argv[1]), {}, [Part("a", (4 * PIECE,), torch.uint8, read, read)])
"""


def run_python(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "plugins", "kernels"))}


@pytest.mark.parametrize("there_is_one", [True, False])
def test_a_save_that_is_killed_leaves_the_old_file_and_nothing_that_looks_like_a_new_one(
    there_is_one: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    parts = [tensor_part("a", torch.arange(10))]
    if there_is_one:
        write_file(path, {}, parts)
    names = leftovers(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", HALF, path], stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    (partial,) = (file for file in tmp_path.iterdir() if file != path)
    assert partial.stat().st_size > 2 * PIECE
    write_file(path, {}, parts)
    assert partial.exists()  # another save to the same name does not take away what is being written
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if not there_is_one:
        path.unlink()
    assert [name for name in leftovers(tmp_path) if name != partial.name] == names
    assert not partial.name.endswith(".safetensors")
    with pytest.raises(PrefixError, match="length or head"), PrefixFile.open(partial):
        pass
    write_file(path, {}, parts)
    assert leftovers(tmp_path) == ["a.safetensors"]  # the next save has cleaned up
    with PrefixFile.open(path) as file:
        assert list(file.tensors) == ["a"]


def test_an_error_while_saving_leaves_nothing(tmp_path: Path) -> None:
    def read_fails(start: int, stop: int) -> torch.Tensor:
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="the store is gone"):
        write_file(tmp_path / "a.safetensors", {}, [Part("a", (4,), torch.uint8, read_fails, print)])
    assert leftovers(tmp_path) == []


def test_a_store_that_fails_while_loading_is_told_and_ends_the_digests(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from pariskv_plugins.resident import ResidentStore

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ResidentStore, "append", fails)
    with pytest.raises(MemoryError, match="no room"):
        load_prefix(good, a_model("ragged"), config_of("ragged"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pariskv-digest")]


def test_cases_cover_rows_with_and_without_a_zone() -> None:
    _, prefix = cases.read("ragged")
    assert [bool(zone) for zone in prefix.cache.request.layers[0].zones] == [True, True, False]
