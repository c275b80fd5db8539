"""The command line: what it prints, and that bad input gets one clear line and exit code 2."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import install

from pariskv import Session, cli, memory
from pariskv.cli import main
from pariskv.errors import ConfigError

FIELDS = {
    "text",
    "prompt_tokens",
    "new_tokens",
    "attended_tokens_per_step",
    "kv_device_bytes",
    "kv_dense_bytes",
    "kv_host_bytes",
    "code_bytes",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "answer_found",
    "prefill_history",
    "calibration",
}
ROOT = Path(__file__).parents[2]
WORDS = " ".join(f"w{1 + i % 39}" for i in range(150))
SMALL = "window: {sink: 4, local: 8, update_interval: 8, dense_below: 0}\nlayers: {default: {top_k: 16}}\n"


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{name: {folder}}}\ngeneration: {{max_new_tokens: 20}}\n{SMALL}")
    return path


def site(folder: Path) -> Path:
    """A folder for distributions that are not installed."""
    (folder / "site").mkdir()
    return folder / "site"


def pariskv(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_json_has_exactly_the_documented_fields(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("run", config, "--prompt", WORDS, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == FIELDS | {"config"}
    assert found["prompt_tokens"] == 150
    assert found["new_tokens"] == 20
    assert found["answer_found"] is None
    assert found["config"]["window"]["sink"] == 4
    # 150 tokens and 19 more by decode steps: sink 4, ring 8 to 16, 16 selected.
    assert 4 + 8 + 16 <= found["attended_tokens_per_step"] <= 4 + 16 + 16
    row = 2 * 8 * 4  # key and value, D = 8, float32
    assert found["kv_dense_bytes"] == 169 * row
    rows, flags = 4 + 16 + 16, 4 + 16
    assert found["kv_device_bytes"] == rows * row + flags
    assert found["kv_host_bytes"] == 152 * row  # the zone at 170 tokens
    assert found["code_bytes"] == 152 * (1 + 4 + 2 + 1) + 256 * 4


def test_compare_is_there_when_asked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("run", config, "layers.default.top_k=400", "layers.default.candidates=1.0",
                   "--prompt", WORDS, "--compare", "dense", "--json") == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert set(found) == FIELDS | {"config", "compare"}
    assert set(found["compare"]) == FIELDS | {"texts_agree"}
    assert found["compare"]["texts_agree"] is True
    assert found["compare"]["text"] == found["text"]
    assert found["compare"]["kv_dense_bytes"] == found["kv_dense_bytes"]


def test_run_streams_the_answer_and_prints_the_table(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("run", config, "--prompt", WORDS, "--compare", "dense", "--max-new-tokens", "5") == 0
    out = capsys.readouterr().out
    for part in ("pariskv: w", "dense: w", "tokens attended per step", "decode, tokens per second", "the texts "):
        assert part in out
    assert re.search(r"new tokens\s*│\s*5 │\s*5 ", out)


def test_the_report_is_headed_by_the_retriever(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("run", config, "layers.default.retriever=quest", "--prompt", WORDS, "--max-new-tokens", "3") == 0
    out = capsys.readouterr().out
    assert "quest: w" in out
    assert re.search(r"┃ +quest ┃", out)
    assert "pariskv" not in out


def test_without_a_prompt_it_is_the_needle_test(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("run", config, "quickstart.prompt_tokens=300", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer_found"] is False  # of a random model
    assert 250 <= found["prompt_tokens"] <= 300


def test_a_prompt_file_is_read(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("w1 w2 w3")
    assert pariskv("run", config, "--prompt-file", tmp_path / "prompt.txt", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 3


# Lines are as long as a case is.
BAD = {
    "no such file": (["run", "{tmp}/nope.yaml"], r"nope\.yaml: no such configuration file"),
    "malformed YAML": (["run", "{tmp}/malformed.yaml"], r"malformed\.yaml.*line 2"),
    "unknown key": (["run", "{config}", "windw.sink=3"], r"windw: unknown key \(did you mean 'window'\?\)"),
    "wrong type": (["run", "{config}", "window.sink=many"], r"window\.sink.*many"),
    "unknown retriever": (
        ["run", "{config}", "layers.default.retriever=pariskw"],
        r"unknown retriever 'pariskw'.*pariskv",
    ),
    "overlap": (
        ["run", "{config}", "layers.0-1.top_k=1", "layers.1-2.top_k=2"],
        r"layers\.0-1 and layers\.1-2 overlap",
    ),
    "range past the model": (["run", "{config}", "layers.0-7.top_k=1", "--prompt", "w1"], r"layers\.0-7.*1 layer"),
    "negative size": (["run", "{config}", "window.sink=-1"], r"window\.sink.*-1"),
    "zero where zero means nothing": (["run", "{config}", "window.local=0"], r"window\.local.*0"),
    "negative top_k": (["run", "{config}", "layers.default.top_k=-1"], r"top_k.*-1"),
    "a stage nobody implements": (
        ["run", "{config}", "layers.default.retriever=resident", "--prompt", "w1"],
        r"no retriever implements coarse_select",
    ),
    "a retriever without the stage": (
        ["run", "{config}", "layers.default.rerank=resident", "--prompt", "w1"],
        r"'resident' does not implement rerank",
    ),
    "unreadable prompt file": (["run", "{config}", "--prompt-file", "{tmp}/none.txt"], r"none\.txt: cannot be read"),
    "empty prompt": (["run", "{config}", "--prompt", " "], r"the prompt is empty"),
    "two prompts": (["run", "{config}", "--prompt", "w1", "--prompt-file", "x"], r"got both, wanted one"),
    "prompt past the context": (
        ["run", "{config}", "quickstart.prompt_tokens=600"],
        r"context is 512.*allow_beyond_context",
    ),
    "no room to generate": (["run", "{config}", "--prompt", WORDS, "--max-new-tokens", "400"], r"lower.*to 362"),
    "unknown model": (["run", "{config}", "model.name=no/such-model", "--prompt", "w1"], r"no/such-model"),
    "no such device here": (["run", "{config}", "model.device=meta", "--prompt", "w1"], r"cpu, cuda or mps only"),
    "a huge layer range": (
        ["run", "{config}", "layers.0-3000000.top_k=3", "--prompt", "w1"],
        r"layers\.0-3000000: wanted layers below 10000",
    ),
    "unknown device": (["run", "{config}", "model.device=abacus", "--prompt", "w1"], r"abacus"),
    "unknown comparison": (["run", "{config}", "--compare", "sparse"], r"--compare: got 'sparse', wanted dense"),
    "a graph where there is no GPU": (
        ["run", "{config}", "runtime.graph=on", "--prompt", "w1"],
        r"runtime\.graph=on: the model is on the cpu, .*use auto or off",
    ),
    "compilation without a graph": (
        ["run", "{config}", "runtime.compile=true", "--prompt", "w1"],
        r"runtime\.compile=true .*: the model is on the cpu, .*use runtime\.compile=false",
    ),
    "a graph that is switched off, compiled": (
        ["run", "{config}", "runtime.graph=off", "runtime.compile=true", "--prompt", "w1"],
        r"runtime\.compile=true .*: runtime\.graph is off; use runtime\.compile=false",
    ),
    "a store for GPUs on a CPU": (
        ["run", "{config}", "store=uva", "--prompt", "w1"],
        r"store uva .*the layer is on cpu; write `store: resident`",
    ),
    "zero new tokens": (["run", "{config}", "--max-new-tokens", "0"], r"max_new_tokens.*0"),
    "no config": (["run"], r"CONFIG"),
    "no such command": (["fly"], r"fly"),
    "needle without room": (["run", "{config}", "quickstart.prompt_tokens=3"], r"ask for at least \d+"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_clear_line_and_exit_code_2(
    arguments: list[str], message: str, config: Path, tmp_path: Path, caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "malformed.yaml").write_text("model: {name: x\nlayers: }\n")
    assert pariskv(*[argument.format(tmp=tmp_path, config=config) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_plugin_that_fails_to_import_is_named_where_it_is_used(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site(tmp_path), "broken-kv", "broken", "import nothing_like_this\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert pariskv("run", config, "--prompt", "w1") == 0
    capsys.readouterr()
    assert pariskv("run", config, "layers.default.retriever=broken", "--prompt", "w1") == 2
    assert re.search(r"error: .*broken.*nothing_like_this", capsys.readouterr().err)
    assert pariskv("plugins", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert "nothing_like_this" in rows["broken"]["error"]
    assert rows["broken"]["distribution"] == "broken-kv"


def test_plugins_lists_name_distribution_version_stages_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("plugins", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows["pariskv"]) == {"name", "distribution", "version", "stages", "format", "error"}
    assert rows["pariskv"]["format"] == "pariskv-m8-framed"
    assert rows["resident"]["stages"] == ["allocate_store", "fetch", "update"]
    assert all(row["error"] is None for name, row in rows.items() if row["distribution"] == "pariskv")
    assert pariskv("plugins") == 0
    assert "coarse_select" in capsys.readouterr().out


def test_not_enough_memory_is_said_before_anything_is_allocated(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000)
    assert pariskv("run", config, "--prompt", WORDS) == 2
    assert re.search(
        r"not enough memory: the cache needs about .* runtime\.check_memory=false", capsys.readouterr().err
    )
    assert pariskv("run", config, "runtime.check_memory=false", "--prompt", WORDS) == 0


def test_a_graph_that_cannot_be_is_refused_before_the_prompt_is_read(config: Path) -> None:
    read: list[int] = []
    with pytest.raises(ConfigError, match=r"runtime\.graph=on"):
        Session.load(config, ["runtime.graph=on"]).run(WORDS, progress=lambda done, total: read.append(done))
    assert read == []
    Session.load(config).run(WORDS, progress=lambda done, total: read.append(done))
    assert read == [150]


def test_beyond_the_context_is_allowed_on_request(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allow = "model.allow_beyond_context=true"
    assert pariskv("run", config, allow, "quickstart.prompt_tokens=600", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] > 512


def test_config_show_prints_what_config_show_reads_back(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pariskv("config", "show", config, "window.local=9") == 0
    shown = capsys.readouterr().out
    assert "local: 9" in shown
    (tmp_path / "again.yaml").write_text(shown)
    assert pariskv("config", "show", tmp_path / "again.yaml") == 0
    assert capsys.readouterr().out == shown


def test_config_validate_checks_names_too(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("config", "validate", config, "layers.0-1.rerank=none", "layers.0-1.candidates=256") == 0
    fine, *lines = capsys.readouterr().out.splitlines()
    assert fine == f"{config}: fine"
    store = "resident (allocate_store, fetch, update), torch (attend)"
    assert lines == [
        f"layers.default: pariskv (encode, coarse_select, rerank), {store}",
        f"layers.0-1: inherited pariskv (encode, coarse_select), {store}",
        "note: layers.0-1.candidates has no effect: nothing reranks, so coarse_select returns the top_k itself",
    ]
    assert pariskv("config", "validate", config, "layers.default.rerank=nobody") == 2
    assert "unknown retriever 'nobody'" in capsys.readouterr().err


def test_debug_gives_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pariskv("run", tmp_path / "nope.yaml", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "arguments", "call", "when"),
    [
        ("rerank", "query, selection, codes, top_k", 1, "while warming up a layer of its kind on random tokens"),
        ("rerank", "query, selection, codes, top_k", 3, "at decode step 2"),
        ("update", "keys, values, store, rows", 2, "while reading the prompt"),
    ],
)
def test_an_error_in_a_stage_says_which_retriever_layer_and_when(
    stage: str,
    arguments: str,
    call: int,
    when: str,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = "selection" if stage == "rerank" else "store.append(keys, values, rows)"
    source = (
        "from pariskv import Retriever, hookimpl\n"
        "class Bad(Retriever):\n"
        "    calls = 0\n"
        "    @hookimpl\n"
        f"    def {stage}(self, {arguments}):\n"
        "        self.calls += 1\n"
        f"        if self.calls == {call}:  # one of them in the warm-up\n"
        "            raise ZeroDivisionError('by mistake')\n"
        f"        return {result}\n"
        "@hookimpl\n"
        "def register_retrievers(register):\n"
        "    register('bad', Bad)\n"
    )
    install(site(tmp_path), "bad-kv", f"bad_{stage}_{call}", source)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    overrides = [f"layers.default.{stage}=bad", "layers.default.candidates=16", "runtime.check_memory=false"]
    assert pariskv("run", config, *overrides, "--prompt", WORDS) == 1
    error = capsys.readouterr().err
    assert re.search(
        rf"ZeroDivisionError: by mistake .*{stage} of retriever 'bad'.*bad-kv.*layer 0; {re.escape(when)}\)", error
    )


def test_ctrl_c_prints_what_there_is_and_exits_with_130(config: Path) -> None:
    command = [sys.executable, "-c", "from pariskv.cli import main; main()", "run", str(config)]
    command += ["model.allow_beyond_context=true", "--prompt", WORDS, "--max-new-tokens", "100000"]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "plugins", "kernels"))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        # What runs in the background of a shell ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert process.stdout is not None
    try:
        first = process.stdout.read(len("pariskv: w"))
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert first == "pariskv: w", error
    assert process.returncode == 130
    assert "tokens attended per step" in rest
    assert "interrupted" in rest
    assert "Traceback" not in error


def test_a_tiny_temperature_is_nearly_greedy(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for temperature in ("1e-310", "0.0"):
        assert pariskv("run", config, f"generation.temperature={temperature}", "--prompt", WORDS, "--json") == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_generate_wants_a_list_of_prompts(config: Path) -> None:
    session = Session.load(config)
    for prompts in ("w1 w2", []):
        with pytest.raises(ConfigError, match="wanted a list of at least one prompt"):
            session.generate(prompts)
    ragged = session.generate([WORDS, "w1 w2 w3"])
    assert ragged == [session.generate([prompt])[0] for prompt in (WORDS, "w1 w2 w3")]
    assert "".join(session.stream(WORDS)) == ragged[0]


def test_what_a_user_waits_for_is_shown_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object) -> int:
        logging.getLogger("pariskv_kernels.launch").info("preparing kernel")
        logging.getLogger("pariskv.graph").info("no news")
        logging.getLogger("pariskv.graph").warning("decode steps run eagerly")
        return 0

    monkeypatch.setattr(cli, "_exit_code", answer)
    with pytest.raises(SystemExit):
        cli.main([])
    assert capsys.readouterr().err == "preparing kernel\ndecode steps run eagerly\n"
