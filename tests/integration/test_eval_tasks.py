"""`pariskv eval tasks` and `merge`: shards, interruptions, protocols, what a run leaves; the published needle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from html_page import read_page
from task_data import write_all

from pariskv.cli import main
from pariskv.config import Config, parse_config
from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.answering import Answer, Prompt, answer, encode
from pariskv.evaluation.tasks.evaluation import Evaluation, Job, Record, Settings
from pariskv.evaluation.tasks.folder import RunFolder, Shard, description, read_answers
from pariskv.evaluation.tasks.item import Item
from pariskv.evaluation.tasks.launch import run_here
from pariskv.evaluation.tasks.merge import merge
from pariskv.evaluation.tasks.report import in_order
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model

YAML = """
model: {{name: {folder}}}
layers: {{default: {{retriever: exact, top_k: 8}}}}
window: {{sink: 4, local: 8, update_interval: 8, dense_below: 0}}
generation: {{chat: "off"}}
"""


@pytest.fixture
def config(folder: Path) -> Config:
    return parse_config(YAML.format(folder=folder))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_all(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def settings(data: Path) -> Settings:
    return Settings(
        ("longbench2", "math500", "niah_single_1"),
        ("dense", "exact"),
        lengths=(260,),
        limit=3,
        max_new_tokens=5,
        batch=2,
        data=data,
    )


def run(config: Config, settings: Settings, path: Path, shard: Shard = Shard()) -> RunFolder:  # noqa: B008
    evaluation = Evaluation(LanguageModel.load(config), config, settings)
    folder = opened(evaluation, path, shard)
    run_here(evaluation, folder, shard)
    return folder


def opened(evaluation: Evaluation, path: Path, shard: Shard = Shard()) -> RunFolder:  # noqa: B008
    manifest = {"run": description(evaluation), "shard": str(shard), "arguments": {}}
    return RunFolder.open(path, manifest)


def without_time(records: list[Record]) -> list[Record]:
    return [replace(record, seconds=0.0) for record in records]


def test_shards_that_are_merged_are_the_unsharded_run(config: Config, settings: Settings, tmp_path: Path) -> None:
    whole = run(config, settings, tmp_path / "whole")
    assert len(whole.records) == 3 * 3 * 2
    shards = [tmp_path / f"shard{index}" for index in (1, 2, 3)]
    sizes = [len(run(config, settings, path, Shard(i, 3)).records) for i, path in enumerate(shards, 1)]
    assert sum(sizes) == len(whole.records)
    assert all(sizes)
    joined = merge(shards[::-1], tmp_path / "joined")
    assert without_time(in_order(joined)) == without_time(in_order(whole))
    prompts = [(tmp_path / name / "prompts.jsonl").read_text() for name in ("whole", "joined")]
    assert prompts[0] == prompts[1]
    assert len(prompts[0].splitlines()) == 9


def test_an_interrupted_run_goes_on_to_what_an_uninterrupted_one_leaves(
    config: Config, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(config, settings, tmp_path / "whole")
    answered: list[Job] = []
    own = Evaluation.answer

    def interrupted(self: Evaluation, job: Job) -> Any:
        answered.append(job)
        if len(answered) == 4:
            raise KeyboardInterrupt
        return own(self, job)

    monkeypatch.setattr(Evaluation, "answer", interrupted)
    path = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        run(config, settings, path)
    assert len(read_answers(path)) == 2 + 2 + 1  # items 0 and 1 by both, item 2 by dense attention
    with (path / "answers.jsonl").open("a") as file:
        file.write('{"task": "cut in the mid')
    resumed = run(config, settings, path)
    assert len(answered) == 4 + (3 * 2 * 2 - 3)  # only what was missing
    assert without_time(in_order(resumed)) == without_time(in_order(whole))
    assert without_time(read_answers(path)) == without_time(list(resumed.records.values()))


def test_a_folder_of_another_run_is_refused(config: Config, settings: Settings, tmp_path: Path) -> None:
    model = LanguageModel.load(config)
    path = tmp_path / "run"
    opened(Evaluation(model, config, settings), path)
    with pytest.raises(ConfigError, match=r"holds another run, which differs in settings\.question; give another"):
        opened(Evaluation(model, config, replace(settings, question="sparse")), path)
    with pytest.raises(ConfigError, match=r"differs in shard"):
        opened(Evaluation(model, config, settings), path, Shard(1, 2))
    (tmp_path / "file").mkdir()
    (tmp_path / "file/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="the folder is not empty and not of a run"):
        opened(Evaluation(model, config, settings), tmp_path / "file")


def test_what_cannot_be_merged_is_refused(config: Config, settings: Settings, tmp_path: Path) -> None:
    model = LanguageModel.load(config)
    evaluation = Evaluation(model, config, settings)
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    opened(evaluation, one, Shard(1, 2))
    opened(evaluation, two, Shard(2, 2))
    opened(Evaluation(model, config, replace(settings, limit=1)), other, Shard(2, 2))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"shard 2/2 is missing; run it with --shards"):
        merge([one], out)
    with pytest.raises(ConfigError, match=r"shard 1/2 is given twice"):
        merge([one, one, two], out)
    with pytest.raises(
        ConfigError, match=r"other: not of the same run as .*one; they differ in settings\.limit, tasks"
    ):
        merge([one, other], out)
    with pytest.raises(ConfigError, match=r"longbench2: item 0 has no answer by every retriever in these shards"):
        merge([one, two], tmp_path / "gaps")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        merge([tmp_path], out)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/", "-1/2"])
def test_shards_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"wanted I/N with 1 <= I <= N"):
        Shard.parse(text)


def test_an_answer_does_not_depend_on_its_batch_and_samples_differ(config: Config, data: Path) -> None:
    config = replace(config, generation=replace(config.generation, temperature=1.0))
    asked = Settings(("math500",), ("exact",), samples=4, max_new_tokens=6, data=data)
    model = LanguageModel.load(config)

    def answers(batch: int) -> list[str]:
        evaluation = Evaluation(model, config, replace(asked, batch=batch))
        return [record.answer for job in evaluation.jobs() for record in evaluation.answer(job).records]

    alone = answers(1)
    assert len(alone) == 12
    assert answers(5) == alone
    assert len(set(alone)) > 6


def test_a_prompt_too_long_for_the_model_is_counted_and_not_asked(config: Config, settings: Settings) -> None:
    model = LanguageModel.load(config)
    model.context_length = 50  # LongBench-v2's made-up prompts have more, those of MATH500 less
    evaluation = Evaluation(model, config, settings)
    records = [one for job in evaluation.jobs()[:8] for one in evaluation.answer(job).records]
    long = [record for record in records if record.task == "longbench2"]
    assert {(one.too_long, one.score, one.answer, one.new_tokens) for one in long} == {(True, None, "", 0)}
    assert all(one.prompt_tokens > 45 for one in long)
    assert {one.too_long for one in records if one.task == "math500"} == {False}


def test_the_answer_to_a_second_request_counts_and_thoughts_are_kept(
    config: Config, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[int], int]] = []

    def answers(
        model: LanguageModel, config: Config, prompts: list[Prompt], new_tokens: int, is_sparse: bool
    ) -> list[Answer]:
        asked.append(([len(prompt.tokens) for prompt in prompts], new_tokens))
        if len(asked) == 1:
            return [Answer(f"The correct answer is (B), w{index}.", 7, index == 1) for index in range(len(prompts))]
        return [Answer(f"The correct answer is ({letter}).", 3, True) for letter in "CB"]

    monkeypatch.setattr("pariskv.evaluation.tasks.evaluation.answer", answers)
    evaluation = Evaluation(LanguageModel.load(config), config, replace(settings, tasks=("longbench2_cot",)))
    records = evaluation.answer(evaluation.jobs()[0]).records
    assert [record.score for record in records] == [0, 1]  # of the second answers alone
    assert [record.thoughts for record in records] == [f"The correct answer is (B), w{index}." for index in (0, 1)]
    assert [(record.new_tokens, record.ended) for record in records] == [(10, False), (10, True)]
    assert [new for _, new in asked] == [5, 128]
    assert Record(**json.loads(json.dumps(records[0].to_dict()))) == records[0]


def test_the_question_is_decoded_under_the_sparse_protocol(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel.load(config)
    item = Item("0", "w1 w2 w3 w4 " * 10, "w5 w6 w7", ("w8",), " w9")
    prompt = encode(model, item, "off")
    assert (len(prompt.tokens), prompt.question) == (44, 40)
    read: list[int] = []
    forward = model.forward

    def watched(tokens: Any, *rest: Any) -> Any:
        read.append(tokens.shape[1])
        return forward(tokens, *rest)

    monkeypatch.setattr(model, "forward", watched)
    generous = replace(config, window=replace(config.window, dense_below=1000))
    dense, sparse = (answer(model, generous, [prompt], 4, is_sparse) for is_sparse in (False, True))
    assert [size for size in read if size > 30] == [44, 40]
    assert read[read.index(40) + 1 :] == [1] * (4 + 3)
    assert dense == sparse  # everything is attended to: the protocols differ in nothing


def test_a_chat_template_is_around_the_prompt_and_before_the_answers_beginning(config: Config) -> None:
    model = LanguageModel.load(config)
    model.tokenizer.chat_template = "w30 {{ messages[0]['content'] }} w31"
    item = Item("0", "w1 w2 w3", " w4", ("w8",), " w9")
    prompt = encode(model, item, "auto")
    assert prompt.tokens == [30, 1, 2, 3, 4, 31, 9]
    assert prompt.question == 4
    assert encode(model, item, "off").tokens == [1, 2, 3, 4, 9]
    assert encode(model, Item("0", "", "w1 w2", ("w1",)), "off").question == 1  # a step needs one token before it


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *arguments])
    out = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out.out, out.err


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(
        YAML.format(folder=folder) + "evaluation: {tasks: [math500, longbench2], limit: 2, max_new_tokens: 3}\n"
    )
    return path


def test_the_configuration_is_the_whole_command_and_the_folder_holds_everything(
    file: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, printed, _ = command(capsys, "tasks", str(file), "--data", str(data), "--out", str(out), "--json")
    assert code == 0
    found = json.loads(printed)
    assert {path.name for path in out.iterdir()} == {
        "manifest.json", "prompts.jsonl", "answers.jsonl", "scores.json", "report.html",
    }  # fmt: skip
    assert json.loads((out / "scores.json").read_text()) == found
    rows = {(row["task"], row["retriever"]): row for row in found["rows"]}
    assert set(rows) == {(task, name) for task in ("math500", "longbench2") for name in ("dense", "exact")}
    assert all(row["items"] == 2 for row in rows.values())
    assert rows["math500", "exact"]["paired"]["items"] == 2
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["run"]["tasks"][0]["source"]["title"] == "MATH500"
    assert manifest["versions"]["pariskv"]
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert prompts[0]["prompt"].startswith("w1 w2 w3\n\nPlease reason step by step")
    again = (out / "answers.jsonl").read_text()
    assert command(capsys, "tasks", str(file), "--data", str(data), "--out", str(out), "--json")[0] == 0
    assert (out / "answers.jsonl").read_text() == again  # nothing is asked twice
    page = " ".join(read_page((out / "report.html").read_text()).texts)
    assert all(text in page for text in ("MATH500", "By longbench2: difficulty", "--data"))


def test_the_page_shows_lengths_positions_and_disagreements(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lengths = tmp_path / "run", (240, 300)
    settings = Settings(("niah_single_1",), ("dense", "exact"), lengths=lengths, limit=2, max_new_tokens=2)
    folder = run(config, settings, path)
    changed = [replace(record, score=1.0, answer="It is <b>7</b>.") for record in folder.records.values()][1]
    folder.records[changed.key] = changed
    from pariskv.bench.manifest import make_manifest
    from pariskv.evaluation.page import page
    from pariskv.evaluation.tasks.report import results_of

    arguments = {"config": "one.yaml", "overrides": None}
    made = make_manifest("eval tasks", arguments, config)
    folder.manifest = {**made, "calibration": None, **folder.manifest, "arguments": arguments}
    results = results_of(folder)
    found = read_page(page(results))
    shown = " ".join(found.texts)
    assert found.tags.count("svg") == 2
    assert "By length" in shown
    assert "By position" in shown
    assert "Where a retriever and dense attention disagree: 1" in shown
    assert "It is <b>7</b>." in shown  # escaped: it is text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "rular"], "--tasks: unknown task 'rular' (did you mean 'ruler'?)"),
        (["--tasks", "hellaswag"], "nothing is decoded and no retriever runs"),
        (["--retrievers", "dense,pariskw"], "did you mean 'pariskv"),
        (["--shards", "3/2"], "--shards: got '3/2', wanted I/N"),
        (["--samples", "4"], "ruler: 4 answers to each item, but generation.temperature=0 gives the same answer each"),
        (["--tasks", "ruler,aime25"], "aime25: 8 answers to each item, but generation.temperature=0 gives the same"),
        (["--haystack", "hay"], "--haystack: got 'hay', wanted one of auto, own, published"),
        (["--data", "no-such-folder"], "there is no such folder"),
        (["--workers", "2"], "--workers: is for --ray"),
        (["evaluation.batch=0"], "evaluation.batch: got 0, wanted an integer >= 1"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("model: {name: ./no-such-model}\nevaluation: {tasks: [ruler]}\n")
    code, _, error = command(capsys, "tasks", str(path), *arguments)
    assert code == 2
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["--ray"], "auto"),
        (["--ray", "--limit", "2"], "auto"),
        (["--ray", "generation.seed=1"], "auto"),
        (["--ray", "auto"], "auto"),
        (["--ray", "local", "--limit", "2"], "local"),
        (["--ray=ray://head:10001"], "ray://head:10001"),
        (["--ray", "10.0.0.1:6379", "generation.seed=1"], "10.0.0.1:6379"),
    ],
)
def test_ray_alone_is_the_cluster_that_ray_finds(
    arguments: list[str], address: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def connected(address: str) -> Any:
        asked.append(address)
        raise ConfigError("no cluster here")

    monkeypatch.setattr("pariskv.evaluation.tasks.cluster.connected", connected)
    assert command(capsys, "tasks", str(file), *arguments)[::2] == (2, "error: no cluster here\n")
    assert asked == [address]


NEEDLE = """
layers: {default: {retriever: exact, top_k: 8}}
window: {sink: 4, local: 64, update_interval: 64, dense_below: 0}
generation: {seed: 3}  # two needles that lie before the window
evaluation: {tasks: [niah_single_1], lengths: [500], limit: 2, max_new_tokens: 10, batch: 2}
"""


@pytest.fixture
def default_model() -> LanguageModel:
    if local_path(resolve_model(DEFAULT_MODEL)) is None:
        pytest.skip("the default model is not on this machine: make model")
    return LanguageModel.load(parse_config(NEEDLE))


def test_the_needle_is_found_by_retrieval_and_not_by_the_window(default_model: LanguageModel, tmp_path: Path) -> None:
    """A small version of the figures in docs/evaluation.md."""
    scores = {}
    for top_k in (0, 8):
        config = parse_config(NEEDLE, [f"layers.default.top_k={top_k}"])
        asked = config.evaluation
        names = ("dense", "exact", "pariskv") if top_k else ("exact",)
        settings = Settings(
            tuple(asked.tasks), names, tuple(asked.lengths), asked.limit, None, asked.max_new_tokens, asked.batch
        )
        evaluation = Evaluation(default_model, config, settings)
        records = [record for job in evaluation.jobs() for record in evaluation.answer(job).records]
        for name in names:
            scores[name, top_k] = sum(record.score or 0 for record in records if record.retriever == name)
    assert scores == {("exact", 0): 0, ("dense", 8): 2, ("exact", 8): 2, ("pariskv", 8): 2}
