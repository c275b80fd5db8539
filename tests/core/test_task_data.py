"""Published data: where they are looked for, and what is said where they are not, or are not what they should be."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_data import write_all

from pariskv.errors import ConfigError
from pariskv.evaluation.tasks import data
from pariskv.evaluation.tasks.catalogue import SUITES, Choice, make_tasks
from pariskv.evaluation.tasks.data import Published, find
from pariskv.evaluation.tasks.evaluation import Settings
from pariskv.evaluation.tasks.gpqa import GPQADiamond
from pariskv.evaluation.tasks.longbench2 import LongBench2
from pariskv.evaluation.tasks.maths import aime25, math500
from pariskv.integrations import dataset_files


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of the hub, and no network."""

    def unreachable(hub_id: str, name: str) -> Path:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(dataset_files, "cached_file", lambda hub_id, name: None)
    monkeypatch.setattr(dataset_files, "download_file", unreachable)


@pytest.mark.parametrize(
    ("make", "path", "source"),
    [
        (LongBench2, "longbench2/data.json", "huggingface.co/datasets/zai-org/LongBench-v2"),
        (GPQADiamond, "gpqa/gpqa_diamond.csv", "huggingface.co/datasets/Idavidrein/gpqa"),
        (math500, "math500/test.jsonl", "huggingface.co/datasets/HuggingFaceH4/MATH-500"),
        (aime25, "aime25/test.jsonl", "huggingface.co/datasets/math-ai/aime25"),
    ],
)
def test_missing_data_say_what_to_get_from_where_and_where_to_put_it(
    make: type, path: str, source: str, tmp_path: Path
) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(ConfigError) as raised:
            make(folder)
        message = str(raised.value)
        assert f"{path} is not on this machine (the hub cannot serve it: no route to host)" in message
        assert f"Get it from {source}" in message
        assert f"put it at DIR/{path} and give --data DIR" in message
        assert ("gated" in message) is (make is GPQADiamond)


def test_a_gated_data_set_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(hub_id: str, name: str) -> Path:
        raise dataset_files.GatedError(f"{hub_id} is gated")

    monkeypatch.setattr(dataset_files, "download_file", gated)
    with pytest.raises(
        ConfigError, match=r"Idavidrein/gpqa is gated.*accept its terms there, then run `hf auth login`"
    ):
        GPQADiamond(None)


def test_the_hubs_cache_is_used_and_data_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.json").write_text("[]")
    (tmp_path / "two.json").write_text("[1]")
    monkeypatch.setattr(dataset_files, "cached_file", lambda hub_id, name: tmp_path / "two.json")
    published = Published("one.json", "somewhere", ("a/b", "two.json"))
    assert find(published, tmp_path).path.name == "one.json"
    assert find(published, None).path.name == "two.json"
    assert data.has(published, None)
    assert find(published, None).sha256 == data.sha256_of(tmp_path / "two.json")


def test_a_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("[]")
    with pytest.raises(
        ConfigError, match=r"one\.json: its sha256 is 4f53cda1.*, wanted 0000 or 1111; .* get it anew from there"
    ):
        find(Published("one.json", "there", sha256=("0000", "1111")), tmp_path)
    digest = data.sha256_of(tmp_path / "one.json")
    assert find(Published("one.json", "there", sha256=("0000", digest)), tmp_path).sha256 == digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "cannot be read as jsonl"),
        ("", "holds no items"),
        ('{"problem": "1 + 1"}\n', "item 0 has no 'answer'; is it the right file?"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "math500").mkdir()
    (tmp_path / "math500/test.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        math500(tmp_path)


def test_every_task_names_its_source_version_licence_and_prompt(tmp_path: Path) -> None:
    write_all(tmp_path)
    tasks = make_tasks(Choice(SUITES, (1024, 2048), tmp_path, "own", 0), lambda item: 0)
    assert len(tasks) == 2 * 13 + 5
    assert len({task.name for task in tasks}) == len(tasks)
    for task in tasks:
        source = task.source
        assert all((source.title, source.version, source.licence, source.data))
        assert "{" in source.prompt
    assert "sha256" in tasks[-1].source.data


def test_unknown_tasks_and_those_that_never_decode_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'rular' \(did you mean 'ruler'\?\); there are ruler, longb"):
        Settings(("rular",), ("dense",))
    with pytest.raises(ConfigError, match=r"mmlu compares the likelihoods of given answers.* nothing is decoded"):
        Settings(("mmlu",), ("dense",))
    with pytest.raises(ConfigError, match=r"--tasks: got none, wanted some of ruler, longbench2, .* evaluation\.tasks"):
        Settings((), ("dense",))
    with pytest.raises(ConfigError, match=r"--retrievers: 'dense' is listed twice"):
        Settings(("ruler",), ("dense", "dense"))
    with pytest.raises(ConfigError, match=r"--question: got 'both', wanted one of dense, sparse"):
        Settings(("ruler",), ("dense",), question="both")
