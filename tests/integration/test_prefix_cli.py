"""`pariskv prefix save | info | load`, and the same from a Session."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pariskv import Session
from pariskv.cli import main
from pariskv.errors import ConfigError, PrefixError

WORDS = " ".join(f"w{1 + i % 39}" for i in range(150))
SMALL = "window: {sink: 4, local: 8, update_interval: 8, dense_below: 0}\nlayers: {default: {top_k: 16}}\n"
TEMPLATE = "{% for one in messages %}w1 {{ one.content }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"


def pariskv(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{name: {folder}}}\ngeneration: {{max_new_tokens: 20}}\n{SMALL}")
    (tmp_path / "text.txt").write_text(WORDS)
    return path


def out(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_saved_text_goes_on_as_run_does(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.safetensors"
    assert pariskv("prefix", "save", config, "--prompt-file", tmp_path / "text.txt", "--out", file) == 0
    said = capsys.readouterr().out
    assert "p.safetensors: 150 tokens" in said.replace("\n", "")
    assert pariskv("run", config, "--prompt", WORDS, "--json") == 0
    want = out(capsys)
    assert pariskv("prefix", "load", file, config, "--json") == 0
    found = out(capsys)
    assert found["text"] == want["text"]
    assert len(found["tokens"]) == want["new_tokens"] == 20
    assert found["prefix_tokens"] == 150
    assert found["bytes"] == file.stat().st_size
    assert found["bytes_per_s"] > 0
    assert pariskv("prefix", "info", file, "--json") == 0
    info = out(capsys)
    assert info["sha256"] in said
    assert info["belongs"]["model"]["id"] == "tiny"
    assert len(info["belongs"]["tokenizer"]) == 64
    assert info["held"]["rows"] == [150]
    assert pariskv("prefix", "info", file) == 0
    table = capsys.readouterr().out
    for part in ("150 tokens", "tiny LlamaForCausalLM float32", "seed=42", "1 pariskv", info["sha256"]):
        assert part in table


def test_a_question_is_appended(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.safetensors"
    assert pariskv("prefix", "save", config, "--prompt", WORDS, "--out", file, "--json") == 0
    assert out(capsys)["held"]["tail"] == ""
    assert pariskv("prefix", "load", file, config, "--prompt", "w5 w6 w7", "--max-new-tokens", "9") == 0
    answer = capsys.readouterr().out.splitlines()[-1]
    session = Session.load(config, ["generation.max_new_tokens=9"])
    live = session.read_prefix([WORDS])
    tokens = [token for (token,) in session.continue_prefix(live, "w5 w6 w7") if token is not None]
    assert session.model.decode(tokens) == answer.strip()
    assert live.lengths == [153]


def test_a_chat_template_is_left_open_and_closed_after_the_question(folder: Path, config: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    session = Session.load(config)
    prefix = session.read_prefix(["w9 w8"])
    assert session.model.decode(prefix.batch.tokens[0].tolist()) == "w1 w9 w8"
    assert prefix.tail == " w2 w3"
    list(session.continue_prefix(prefix, " w7"))
    assert session.model.decode(prefix.batch.tokens[0].tolist()) == "w1 w9 w8 w7 w2 w3"
    whole = session.model.encode(["w9 w8 w7"], "on")
    assert torch.equal(prefix.batch.tokens, whole.tokens)


def test_another_text_tokenizer_or_retriever_is_refused(
    config: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.safetensors"
    assert pariskv("prefix", "save", config, "--prompt", WORDS, "--out", file) == 0
    assert pariskv("prefix", "load", file, config, "--text-file", tmp_path / "text.txt") == 0
    (tmp_path / "text.txt").write_text(WORDS + " w1")
    capsys.readouterr()
    assert pariskv("prefix", "load", file, config, "--text-file", tmp_path / "text.txt") == 2
    assert "p.safetensors: tokens: the prefix is of another text" in capsys.readouterr().err
    assert pariskv("prefix", "load", file, config, "layers.default.retriever=quest") == 2
    assert "retrievers.pariskv: saved" in capsys.readouterr().err
    assert pariskv("prefix", "load", file, config, "--sha256", "abc") == 2
    assert "sha256: wanted abc" in capsys.readouterr().err
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w39"', '"w93"'))
    assert pariskv("prefix", "load", file, config) == 2
    assert "tokenizer: the prefix does not belong here: tokenizer: saved" in capsys.readouterr().err
    elsewhere = shutil.copytree(folder, tmp_path / "renamed")
    assert pariskv("prefix", "load", file, config, f"model.name={elsewhere}") == 2
    assert "model.id: saved tiny, here renamed" in capsys.readouterr().err


BAD = {
    "no text": (["save", "{config}", "--out", "{tmp}/p.safetensors"], "got no text to read"),
    "another ending": (["save", "{config}", "--prompt", "w1", "--out", "{tmp}/p.bin"], r"ends in .safetensors"),
    "no folder": (["save", "{config}", "--prompt", "w1", "--out", "{tmp}/no/p.safetensors"], "is no folder"),
    "no file": (["load", "{tmp}/p.safetensors", "{config}"], "p.safetensors: no such file"),
    "no prefix": (["info", "{config}"], "length or head: the file is cut off, or no safetensors file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line(
    name: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = BAD[name]
    assert pariskv("prefix", *(argument.format(config=config, tmp=tmp_path) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_batch_is_saved_and_loaded_from_python(config: Path, tmp_path: Path) -> None:
    from pariskv.prefix import save_prefix

    session = Session.load(config)
    texts = [WORDS, "w1 w2 w3"]
    live = session.read_prefix(texts)
    save_prefix(tmp_path / "p.safetensors", live, session.model)
    loaded = Session.load(config).load_prefix(tmp_path / "p.safetensors", texts)
    want = list(session.continue_prefix(live))
    assert list(session.continue_prefix(loaded)) == want
    with pytest.raises(PrefixError, match="tokens: the prefix is of another text"):
        session.load_prefix(tmp_path / "p.safetensors", texts[:1])
    with pytest.raises(ConfigError, match="holds no token"):
        session.read_prefix([""])


def test_a_file_of_several_rows_is_for_python(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pariskv.prefix import save_prefix

    session = Session.load(config)
    save_prefix(tmp_path / "p.safetensors", session.read_prefix(["w1 w2", "w3"]), session.model)
    assert pariskv("prefix", "load", tmp_path / "p.safetensors", config) == 2
    assert "rows: holds 2; this command goes on with one" in capsys.readouterr().err
