"""A model's query statistics: what is measured, how it is kept, and that it reaches the retriever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import language_model, prompt, tiny_model

from pariskv import ParisCache, parse_config
from pariskv.cli import main
from pariskv.decode import Batch
from pariskv.errors import ModelError
from pariskv.integrations.calibrate import calibrate, ensure_calibrated
from pariskv.integrations.calibration import (
    Calibration,
    file_of,
    find_calibration,
    fingerprint,
    load_calibration,
    save_calibration,
)

SMALL = "window: {sink: 4, local: 8, update_interval: 8, dense_below: 0}\nlayers: {default: {top_k: 16}}\n"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARISKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def readable(model: Any) -> Any:
    """A language model to which a text is its length in random tokens."""
    made = language_model(model)
    made.encode = lambda prompts, chat="off": Batch(prompt(len(prompts[0]), seed=len(prompts[0])))
    return made


def test_moments_are_the_mean_of_all_queries_after_the_rotary_embedding() -> None:
    model = tiny_model("llama")
    seen: dict[int, list[torch.Tensor]] = {}
    config = parse_config({"retrievers": {"it": {"type": "snapkv"}}, "layers": {"default": {"retriever": "it"}}})
    found = calibrate(readable(model), ["a" * 50, "b" * 30], tokens=40)
    assert found.about["tokens"] == 70
    # The same queries, as a format that wants them is given them.
    for n in (50, 30):
        cache = ParisCache(model, config)
        with torch.no_grad():
            model(prompt(n, seed=n)[:, :40], cache=cache, use_cache=True)
        for index, layer in cache.request.layers.items():
            assert layer.queries is not None
            seen.setdefault(index, []).append(layer.queries.query_moment()[0])
    group = next(iter(cache.request.layers.values())).info.group
    for index, moments in seen.items():
        wanted = sum(moments) / (70 * group)
        torch.testing.assert_close(found.moments[index], wanted.float(), rtol=1e-4, atol=1e-5)


def test_it_is_made_once_and_found_by_the_weights_whatever_the_model_is_called() -> None:
    model = tiny_model("llama")
    assert find_calibration(model) is None
    path = ensure_calibrated(readable(model))
    assert path == file_of(model)
    assert ensure_calibrated(readable(model)) is None
    again = find_calibration(tiny_model("llama"))
    assert again is not None
    assert again.fingerprint == fingerprint(model)
    assert find_calibration(tiny_model("llama", seed=1)) is None


@pytest.mark.parametrize("precondition", ["model", "both", "prompt"])
def test_the_retriever_encodes_by_it(precondition: str) -> None:
    model = tiny_model("llama")
    config = parse_config(
        {
            "retrievers": {"it": {"type": "pariskv", "precondition": precondition}},
            "layers": {"default": {"retriever": "it", "top_k": 4}},
            "window": {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0},
        }
    )

    def frame() -> torch.Tensor:
        cache = ParisCache(model, config)
        lm = language_model(model)
        from pariskv.decode import prefill

        prefill(lm, cache, Batch(prompt(90)), 4)
        return cache.request.layers[0].zone.states["it"]["keys_to"].clone()

    without = frame()
    ensure_calibrated(readable(model))
    assert torch.equal(frame(), without) == (precondition == "prompt")


def test_a_cache_says_which_calibration_it_uses_and_none_where_nobody_asks() -> None:
    model = tiny_model("llama")

    def used(retriever: str, **options: str) -> str | None:
        retrievers = {"it": {"type": retriever, **options}}
        config = parse_config({"retrievers": retrievers, "layers": {"default": {"retriever": "it"}}})
        return ParisCache(model, config).calibration

    assert used("pariskv") is None
    path = ensure_calibrated(readable(model))
    assert used("pariskv") == str(path)
    assert used("pariskv", precondition="prompt") is None
    assert used("exact") is None


def test_the_commands_say_which_calibration_was_used(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text = tmp_path / "one.yaml", tmp_path / "text.txt"
    config.write_text(f"model: {{name: {folder}}}\n{SMALL}")
    text.write_text(" ".join(f"w{1 + i % 39}" for i in range(200)))

    def found(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        assert stopped.value.code == 0
        return json.loads(capsys.readouterr().out)

    eval_ = ["eval", "fidelity", config, "--text-file", text, "--tokens", "150", "--steps", "2", "--json"]
    compare = ["compare", config, "--prompt-file", text, "--steps", "2", "--json", "--retrievers"]
    run = ["run", config, "--prompt-file", text, "--max-new-tokens", "2", "--json"]
    assert found(*eval_)["manifest"]["calibration"] is None
    assert found(*run)["calibration"] is None
    with pytest.raises(SystemExit):
        main(["calibrate", str(config), "--text-file", str(text)])
    (path,) = (tmp_path / "cache").rglob("*.safetensors")
    assert capsys.readouterr().out.strip().endswith(str(path))
    assert found(*eval_)["manifest"]["calibration"] == str(path)
    assert found(*eval_, "--preset", "pariskv-paper")["manifest"]["calibration"] is None
    assert found(*compare, "exact,pariskv")["manifest"]["calibration"] == str(path)
    assert found(*compare, "exact")["manifest"]["calibration"] is None
    assert found(*run)["calibration"] == str(path)


def kept(tmp_path: Path) -> tuple[Path, Calibration]:
    calibration = Calibration({0: torch.eye(4).unsqueeze(0)}, "abc", {"tokens": 3})
    path = tmp_path / "one.safetensors"
    save_calibration(calibration, path)
    return path, calibration


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    path, calibration = kept(tmp_path)
    got = load_calibration(path, "abc")
    assert torch.equal(got.moments[0], calibration.moments[0])
    assert got.about == {"tokens": 3}
    assert list(tmp_path.iterdir()) == [path]  # nothing half written is left


def test_a_file_that_does_not_belong_or_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = kept(tmp_path)
    with pytest.raises(ModelError, match=r"one\.safetensors: belongs to a model with other weights; calibrate"):
        load_calibration(path, "other")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelError, match=r"one\.safetensors: the calibration cannot be read: .*calibrate the model"):
        load_calibration(path, "abc")
    save_file({"x": torch.zeros(1)}, path, {"format": "pariskv-calibration", "version": "0"})
    with pytest.raises(ModelError, match="wanted pariskv-calibration 1, got pariskv-calibration 0"):
        load_calibration(path, "abc")


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="the calibration cannot be written"):
        save_calibration(Calibration({}, "abc"), tmp_path / "file" / "one.safetensors")
