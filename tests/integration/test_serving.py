"""Many requests when something goes wrong: nobody else pays for it, nothing is lost, and what was kept goes on."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import fail_at
from faults import HOOKS, noted_stores, raise_beyond
from prefix_cases import config_of
from tiny_models import language_model, prompt, tiny_model

from pariskv import Session
from pariskv.cli import main
from pariskv.config import GenerationConfig
from pariskv.errors import CapacityError, ConfigError
from pariskv.integrations.language_model import LanguageModel
from pariskv.sampling import NOT_FINITE, Sampler
from pariskv.serving.batching import Answer, Ask, Batching
from pariskv.serving.journal import Journal
from pariskv.zone import Zone

ROOT = Path(__file__).parents[2]
SMALL = "window: {sink: 4, local: 8, update_interval: 8, dense_below: 0}\nlayers: {default: {top_k: 16}}\n"


# A batch


def a_model(**changes: Any) -> LanguageModel:
    return language_model(tiny_model("llama", torch.float64, **changes))


def asks() -> list[Ask]:
    return [Ask(prompt(40 + 13 * seed, seed=seed)[0].tolist(), 12 + seed) for seed in range(5)]


def answered(model: LanguageModel, given: list[Ask], rows: int = 3) -> dict[int, Answer]:
    config = config_of("pariskv")
    batching = Batching(model, lambda: model.new_cache(config), rows, config.generation, config.runtime)
    return {answer.index: answer for answer in batching.answers(given)}


@pytest.mark.parametrize("stage", HOOKS)
def test_a_step_that_fails_costs_only_the_request_at_fault(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook raises whenever a row past 160 tokens is decoded: only the longest request gets there, alone, too."""
    model, given = a_model(), [*asks(), Ask(prompt(150, seed=9)[0].tolist(), 60)]
    wanted = answered(model, given)
    raise_beyond(monkeypatch, stage, layer=1, tokens=160)
    found = answered(model, given)
    assert {index: found[index] for index in range(5)} == {index: wanted[index] for index in range(5)}
    assert "the retriever gave up" in found[5].error
    assert "at decode step" in found[5].error
    assert wanted[5].tokens[: len(found[5].tokens)] == found[5].tokens
    assert 10 <= len(found[5].tokens) < 60


LONG = [Ask(prompt(60 - 10 * seed, seed=seed)[0].tolist(), new) for seed, new in enumerate((1010, 900, 150))]
"""The first is beyond 1,058 tokens in its step 1,000, as no other ever is; the third runs beside it then."""


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Answer]:
    return answered(a_model(num_hidden_layers=1), LONG, rows=2)


@pytest.mark.parametrize("stage", HOOKS)
def test_a_hook_that_raises_at_step_1000_ends_its_request_and_leaks_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[int, Answer]
) -> None:
    """The others go on to their ends, what was generated is delivered, and every store is freed: counted."""
    stores = noted_stores(monkeypatch)
    raise_beyond(monkeypatch, stage, layer=0, tokens=1058)
    found = answered(a_model(num_hidden_layers=1), LONG, rows=2)
    assert {index: found[index] for index in (1, 2)} == {index: undisturbed[index] for index in (1, 2)}
    assert [len(found[index].tokens) for index in (1, 2)] == [900, 150]
    step = len(found[0].tokens)
    # What leaves for the zone does so at every eighth token.
    assert 1000 <= step <= (1008 if stage in ("encode", "update") else 1000)
    assert found[0].tokens == undisturbed[0].tokens[:step]
    assert "the retriever gave up" in found[0].error
    assert f"at decode step {step}" in found[0].error
    gc.collect()
    assert len(stores) == 4, "the batch's, that in which prompts are read, one for each that was answered alone"
    assert not [one for one in stores if one() is not None]


def test_a_request_that_finds_no_memory_beside_the_others_is_answered_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given = a_model(), asks()
    wanted, reserve = answered(model, given), Zone.reserve

    def scarce(self: Zone, tokens: int, planned: int = 0) -> None:
        if self.info.batch > 1 and tokens > 70:
            raise torch.OutOfMemoryError("no memory for so many rows")
        reserve(self, tokens, planned)

    monkeypatch.setattr(Zone, "reserve", scarce)
    assert answered(model, given) == wanted


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_are_not_finite_end_their_own_request(value: float) -> None:
    model, given = a_model(), asks()
    wanted = answered(model, given)
    unused = next(token for token in range(1, 97) if all(token not in ask.tokens for ask in given))
    assert all(unused not in answer.tokens for answer in wanted.values())
    with torch.no_grad():
        model.model.model.embed_tokens.weight[unused] = value
    found = answered(model, [*given, Ask([*given[0].tokens[:20], unused, 5, 6], 9)])
    assert {index: found[index] for index in range(5)} == wanted
    assert found[5].tokens == []
    assert "NaN or infinite" in found[5].error


def test_zero_keys_are_keys_like_others() -> None:
    """A token whose hidden state, and so its key, is zero: the batch answers as each request alone."""
    model = a_model()
    with torch.no_grad():
        model.model.model.embed_tokens.weight[7] = 0
    given = [Ask([7] * 60, 12), Ask([*prompt(50)[0].tolist(), 7, 7], 12), *asks()]
    assert answered(model, given) == answered(model, given, rows=1)


def test_logits_without_a_largest_are_no_token() -> None:
    logits = torch.zeros(4, 9)
    logits[1, 3], logits[2, 3], logits[3, 2:] = float("nan"), float("inf"), -float("inf")
    for temperature in (0.0, 0.7):
        chosen = Sampler(GenerationConfig(temperature=temperature), 4)(logits).tolist()
        assert chosen[1:3] == [NOT_FINITE, NOT_FINITE]
        assert chosen[0] >= 0
        assert 0 <= chosen[3] < 2


def test_nothing_of_a_batch_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: every store of a run that failed in the middle is gone when it ends, with its memory."""
    stores, model = noted_stores(monkeypatch), a_model()
    calls = fail_at(monkeypatch, Zone, "append", 30)
    found = answered(model, asks())
    assert calls[0] > 30
    assert not any(answer.error for answer in found.values())
    gc.collect()
    assert len(stores) == 12, "two layers each: of the batches, of what they were read with, of those answered alone"
    assert not [one for one in stores if one() is not None]


# A file of prompts


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{name: {folder}, dtype: float32}}\ngeneration: {{max_new_tokens: 9}}\n{SMALL}")
    return path


def write_prompts(path: Path, count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    texts = [" ".join(f"w{draw.randint(1, 39)}" for _ in range(draw.randint(1, 90))) for _ in range(count)]
    lines = [json.dumps({"prompt": text, "id": f"q{index}"}) for index, text in enumerate(texts)]
    lines[1] = "not json"
    lines[3] = json.dumps({"prompt": "w1 " * 600})  # beyond the model's context
    path.write_text("\n".join(lines) + "\n")
    return texts


def pariskv(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_prompts_is_answered_in_its_order_each_as_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_prompts(tmp_path / "in.jsonl", 9)
    out = tmp_path / "out.jsonl"
    assert pariskv("run", config, "--prompts", tmp_path / "in.jsonl", "--batch-size", 3, "--output", out) == 1
    assert "9 prompts answered; 2 failed" in capsys.readouterr().err
    assert not out.with_name("out.jsonl.journal").exists()
    rows, session = rows_of(out), Session.load(config)
    assert [row["index"] for row in rows] == list(range(9))
    assert [row.get("id") for row in rows if "error" not in row] == [f"q{index}" for index in (0, 2, *range(4, 9))]
    assert "line 2: no JSON" in rows[1]["error"]
    assert "context is 512" in rows[3]["error"]
    for index in (0, 2, *range(4, 9)):
        assert rows[index]["text"] == session.generate([texts[index]])[0], index
    assert pariskv("run", config, "--prompts", tmp_path / "in.jsonl") == 1
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_a_killed_run_goes_on_where_it_was(config: Path, tmp_path: Path) -> None:
    """kill -9 in the middle, then --resume: the same file as without it, and nothing is answered twice."""
    write_prompts(tmp_path / "in.jsonl", 40, seed=1)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    common = ["run", config, "--prompts", tmp_path / "in.jsonl", "--batch-size", 4]
    assert pariskv(*common, "--output", whole) == 1
    journal = tmp_path / "out.jsonl.journal"
    code = "import sys; from pariskv.cli import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, common), "--output", str(out)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 8:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    kept = journal.read_bytes()
    assert not out.exists()
    journal.write_bytes(kept + b'{"index": 39, "te')  # what a write that was cut off leaves
    assert pariskv(*common, "--output", out) == 2, "without --resume it would begin anew"
    assert journal.read_bytes() == kept + b'{"index": 39, "te'
    assert pariskv(*common, "--output", out, "--resume") == 1
    assert rows_of(out) == rows_of(whole)
    assert not journal.exists()


def test_a_journal_of_other_work_is_refused_by_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="was not begun"):
        Journal(out, {"prompts": "a"}, resume=True)
    Journal(out, {"prompts": "a", "config": {"top_k": 1}}, resume=False).add({"index": 0})
    with pytest.raises(ConfigError, match=r"an interrupted run left .*out\.jsonl\.journal"):
        Journal(out, {"prompts": "a", "config": {"top_k": 1}}, resume=False)
    with pytest.raises(ConfigError, match=r"of other work: config\.top_k differ"):
        Journal(out, {"prompts": "a", "config": {"top_k": 2}}, resume=True)
    taken = Journal(out, {"prompts": "a", "config": {"top_k": 1}}, resume=True)
    assert taken.done == {0: {"index": 0}}
    taken.path.write_text("[]\n")
    with pytest.raises(ConfigError, match="no journal"):
        Journal(out, {"prompts": "a"}, resume=True)


def test_a_full_disk_keeps_the_results_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    running = Journal(tmp_path / "out.jsonl", {"prompts": "a"}, resume=False)
    running.add({"index": 0})
    with monkeypatch.context() as patch:
        patch.setattr("pariskv.serving.journal.append_lines", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device; make room, and go on with"):
            running.add({"index": 1})
    assert Journal(tmp_path / "out.jsonl", {"prompts": "a"}, resume=True).done == {0: {"index": 0}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "{0}", "--prompt", "w1"], "--prompt is for one prompt"),
        (["--batch-size", "2"], "--batch-size is for --prompts"),
        (["--prompts", "{0}", "--resume"], "--resume: wanted --output"),
        (["--prompts", "{0}.not"], "no such file"),
        (["--prompts", "{0}", "--output", "no/where.jsonl"], "there is no folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path / "in.jsonl", 5)
    assert pariskv("run", config, *(one.format(tmp_path / "in.jsonl") for one in arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_memory_for_more_delivers_what_it_has(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append, calls = Zone.append, 0

    def failing(self: Zone, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            self.store.capacity = 0
            self._grow = no_memory  # type: ignore[method-assign]
            Zone.reserve(self, 10_000)
        append(self, *arguments)

    def no_memory(capacity: int) -> None:
        raise CapacityError("layer 0: no memory to grow the zone")

    monkeypatch.setattr(Zone, "append", failing)
    words = " ".join(f"w{1 + i % 39}" for i in range(60))
    assert pariskv("run", config, "--prompt", words, "--max-new-tokens", 60, "--json") == 2
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert 1 < found["new_tokens"] < 60
    assert "no memory to grow the zone" in found["error"]
    assert "no memory to grow the zone" in out.err
