"""Fidelity along a text: figures against the oracle and dense attention, what is refused, and the command."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from html_page import read_page
from pariskv_plugins.paris import framed
from pariskv_plugins.paris.frame import learn_frame
from tiny_models import language_model, prompt, tiny_model

from pariskv import parse_config, texts
from pariskv.cli import main
from pariskv.config import Config
from pariskv.decode import Batch
from pariskv.errors import CapacityError, ConfigError
from pariskv.evaluation.fidelity import SUMMARY, measure_fidelity
from pariskv.types import LayerInfo, Prefill, Tensors


def config_of(retriever: str, **layer: Any) -> Config:
    return parse_config(
        {
            "layers": {"default": {"retriever": retriever, **layer}},
            "window": {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0},
        }
    )


def readable(context: int | None = None) -> Any:
    """A tiny model to which a text is its length in random tokens."""
    made = language_model(tiny_model("llama", torch.float32))
    made.encode = lambda prompts, chat="off": Batch(prompt(len(prompts[0]), seed=len(prompts[0])))
    made.context_length = context
    return made


def test_of_everything_retrieved_nothing_is_lost() -> None:
    found = measure_fidelity(readable(), config_of("exact", top_k=400), {"one": "a" * 200, "two": "b" * 190}, 150, 12)
    summary = found.summary()
    assert tuple(summary) == SUMMARY
    for name in ("candidate_recall", "recall", "mass_ratio", "argmax_agreement"):
        assert summary[name] == pytest.approx(1, abs=1e-6)
    assert summary["output_error"] == pytest.approx(0, abs=1e-4)
    assert summary["kl"] == pytest.approx(0, abs=1e-6)
    assert list(found.texts) == ["one", "two"]
    assert [row["layer"] for row in found.layers()] == sorted(row["layer"] for row in found.layers())
    assert all(len(row["heads"]["recall"]) > 1 for row in found.layers())


def test_a_retriever_is_between_the_window_and_the_oracle() -> None:
    mass = {}
    for name in ("window", "pariskv", "exact"):
        summary = measure_fidelity(readable(), config_of(name, top_k=8), {"one": "a" * 200}, 150, 8).summary()
        assert summary["mass_ratio"] is not None
        mass[name] = summary["mass_ratio"]
    assert mass["window"] == 0
    assert mass["exact"] == pytest.approx(1, abs=1e-5)
    assert 0.5 < mass["pariskv"] < 1


def test_the_summary_is_the_mean_of_the_texts() -> None:
    found = measure_fidelity(readable(), config_of("pariskv", top_k=8), {"one": "a" * 200, "two": "b" * 190}, 150, 8)
    for name, value in found.summary().items():
        both = [found.texts[text][name] for text in ("one", "two")]
        assert value == pytest.approx(sum(both) / 2), name  # type: ignore[arg-type]


def test_a_prompt_is_read_and_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []

    def counted(layer: LayerInfo, prefill: Prefill, *arguments: Any, **options: Any) -> Tensors:
        if prefill.lengths[0] > 100:  # less is a warm-up
            fitted.append(layer.index)
        return learn_frame(layer, prefill, *arguments, **options)

    monkeypatch.setattr(framed, "learn_frame", counted)
    model, read = readable(), []
    model.model.model.embed_tokens.register_forward_hook(lambda _, given, __: read.append(given[0].shape[1]))
    measure_fidelity(model, config_of("pariskv", top_k=8), {"one": "a" * 200, "two": "b" * 190}, 150, 8)
    assert fitted == [0, 1, 2] * 2
    assert read.count(150) == 2
    assert read.count(1) == len(read) - 2 == 2 * 2 * 8  # dense steps, and those of the retriever


def test_texts_and_lengths_that_cannot_be_are_refused() -> None:
    config = config_of("pariskv", top_k=8)
    with pytest.raises(ConfigError, match=r"text 'one' has 100 tokens, wanted 162 \(--tokens and --steps together\)"):
        measure_fidelity(readable(), config, {"one": "a" * 100}, 150, 12)
    with pytest.raises(ConfigError, match=r"\(--tokens\) has 15 tokens, all of which .* attend to; give it 20"):
        measure_fidelity(readable(), config, {"one": "a" * 100}, 15, 12)
    with pytest.raises(CapacityError, match=r"has 80 tokens and 12 are decoded .* context is 90; give it 78"):
        measure_fidelity(readable(90), config, {"one": "a" * 100}, 80, 12)


def test_the_texts_of_the_standard_library_are_long_and_different() -> None:
    found = {name: text() for name, text in (texts.STANDARD | texts.CALIBRATION).items()}  # type: ignore[operator]
    assert all(len(text) > 60_000 for text in found.values())
    assert len({texts.sha256(text) for text in found.values()}) == len(found)


def test_a_text_file_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a text file"):
        texts.read_text(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match=r"empty\.txt: the file is empty"):
        texts.read_text(tmp_path / "empty.txt")


def test_the_command_writes_json_a_page_and_a_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text, report, plot = (tmp_path / name for name in ("one.yaml", "<b>.txt", "one.html", "one.svg"))
    config.write_text(f"model: {{name: {folder}}}\nwindow: {{sink: 4, local: 8, update_interval: 8, dense_below: 0}}\n")
    text.write_text(" ".join(f"w{1 + i % 39}" for i in range(200)))
    sizes = ["--tokens", "150", "--steps", "3", "--top-k", "16"]
    files = ["--text-file", str(text), "--report", str(report), "--plot", str(plot)]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "fidelity", str(config), *sizes, *files, "--json"])
    assert stopped.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"manifest", "layers", "summary"}
    assert len(found["manifest"]["measured"]["kl_by_step"]) == 3
    assert sum(found["manifest"]["measured"]["kl_by_step"]) / 3 == pytest.approx(found["summary"]["kl"])
    page = read_page(report.read_text())
    shown = " ".join(page.texts)
    for name, value in found["summary"].items():
        assert f"{value:.{1 if name == 'fetched' else 4}f}" in shown, name
    for layer in found["layers"]:
        assert f"{layer['mass_ratio']:.4f}" in shown
    assert page.tags.count("svg") == 2
    assert str(text) in shown
    assert "--tokens 150 --steps 3 --top-k 16" in shown
    assert len(re.findall(r'id="axes_\d+"', plot.read_text())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "page.pdf"], "--report page.pdf: wanted a file that ends in .html"),
        (["--preset", "pariskw"], "did you mean 'pariskv"),
        (["--text-file", "none.txt"], "none.txt: cannot be read as a text file"),
        (["--candidates", "2.5"], "layers.default.candidates: got 2.5"),
    ],
)
def test_the_command_refuses_what_cannot_be_before_a_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.yaml"
    file.write_text("model: {name: ./no-such-model}\n")
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "fidelity", str(file), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_on_the_default_model_pariskv_beats_the_paper_at_the_same_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """A loose pin of the documented figures: 2,500 tokens of source code, 4 steps, a tenth of them candidates."""
    from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model

    if local_path(resolve_model(DEFAULT_MODEL)) is None:
        pytest.skip("the default model is not on this machine: make model")
    found = {}
    common = ["--tokens", "2500", "--steps", "4", "--top-k", "100", "--candidates", "0.1", "--json"]
    text = Path(argparse.__file__)
    for preset in ("pariskv", "pariskv-paper"):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "fidelity", "configs/smollm2.yaml", "--preset", preset, "--text-file", str(text), *common])
        assert stopped.value.code == 0
        found[preset] = json.loads(capsys.readouterr().out)
    ours, papers = found["pariskv"]["summary"], found["pariskv-paper"]["summary"]
    assert set(found["pariskv"]) == {"manifest", "layers", "summary"}
    assert len(found["pariskv"]["layers"]) == 30
    assert ours["mass_ratio"] > 0.9
    assert ours["mass_ratio"] > papers["mass_ratio"] + 0.1
    assert ours["recall"] > papers["recall"] + 0.2
    assert ours["kl"] < papers["kl"]
