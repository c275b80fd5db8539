"""A run on a local Ray cluster of two workers: the answers of a run in one process, a lost worker's among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from task_data import write_all

from pariskv.config import Config, parse_config
from pariskv.errors import ConfigError
from pariskv.evaluation.tasks import cluster as cluster_module
from pariskv.evaluation.tasks.cluster import LOCAL, Cluster, Worker, connected
from pariskv.evaluation.tasks.evaluation import Answered, Evaluation, Job, Settings
from pariskv.evaluation.tasks.folder import RunFolder, Shard, description
from pariskv.evaluation.tasks.launch import run_here
from pariskv.evaluation.tasks.report import in_order, results_of
from pariskv.integrations.language_model import LanguageModel
from tests.integration.test_eval_tasks import YAML, opened, without_time

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pariskv[ray]'")


@pytest.fixture
def config(folder: Path) -> Config:
    return parse_config(YAML.format(folder=folder))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_all(tmp_path / "data")
    return Settings(("math500", "longbench2"), ("dense", "exact"), max_new_tokens=4, data=tmp_path / "data")


@pytest.fixture
def ray() -> Iterator[Any]:
    with connected(LOCAL) as found:
        found.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["x"]))
        yield found


class LostOnce(Worker):
    """Dies at its first LongBench-v2 job, unless another one did before."""

    mark = ""

    def answer(self, job: Job) -> Answered:
        if job.keys[0][0] == "longbench2" and not Path(self.mark).exists():
            Path(self.mark).touch()
            os._exit(1)
        return super().answer(job)


class AlwaysLost(Worker):
    def answer(self, job: Job) -> Answered:
        os._exit(1)


class FirstIsLost(Worker):
    """The first that starts dies at once."""

    mark = ""

    def __init__(self, config: Config, settings: Settings):
        try:
            Path(self.mark).touch(exist_ok=False)
        except FileExistsError:
            super().__init__(config, settings)
        else:
            os._exit(1)


class NeverThere(Worker):
    def __init__(self, config: Config, settings: Settings):
        os._exit(1)


class Refusing(Worker):
    def answer(self, job: Job) -> Answered:
        raise ConfigError("refused on the worker")


def kind_of(base: type[Worker], **attributes: str) -> type[Worker]:
    return type(base.__name__, (base,), attributes)


def test_two_workers_answer_as_one_process_does_though_one_is_lost(
    ray: Any, config: Config, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "TABLE_SECONDS", 0.0)
    evaluation = Evaluation(LanguageModel.load(config), config, settings)
    alone = opened(evaluation, tmp_path / "alone")
    run_here(evaluation, alone, Shard())

    mark, tables = tmp_path / "lost", []
    workers = Cluster(ray, config, settings, 2, kind_of(LostOnce, mark=str(mark)))
    run, jobs = workers.describe()
    assert run == description(evaluation)
    folder = RunFolder.open(tmp_path / "together", {"run": run, "shard": "1/1", "arguments": {}})
    workers.run(jobs, folder, Shard(), on_table=lambda: tables.append(results_of(folder).tables[0].rows))
    assert mark.exists()
    assert without_time(in_order(folder)) == without_time(in_order(alone))
    assert len(tables) == len(jobs) + 1  # the lost one came back once more
    assert len(tables[0]) < len(tables[-1]) == 4  # partial tables came on the way


def test_a_job_that_loses_every_worker_ends_the_run_and_an_error_is_the_workers_own(
    ray: Any, config: Config, settings: Settings, tmp_path: Path
) -> None:
    for kind, message in (
        (
            kind_of(AlwaysLost),
            r"math500, item 0: 3 workers were lost over it .The actor died.* the same command goes on",
        ),
        (kind_of(Refusing), "refused on the worker"),
    ):
        workers = Cluster(ray, config, settings, 1, kind)
        run, jobs = workers.describe()
        folder = RunFolder.open(tmp_path / kind.__name__, {"run": run, "shard": "1/1", "arguments": {}})
        with pytest.raises(ConfigError, match=message):
            workers.run(jobs, folder, Shard())


def test_a_worker_that_is_lost_at_the_start_is_not_waited_for(
    ray: Any, config: Config, settings: Settings, tmp_path: Path
) -> None:
    workers = Cluster(ray, config, settings, 2, kind_of(FirstIsLost, mark=str(tmp_path / "lost")))
    run, jobs = workers.describe()
    folder = RunFolder.open(tmp_path / "run", {"run": run, "shard": "1/1", "arguments": {}})
    workers.run(jobs[:3], folder, Shard())
    assert len(folder.records) == 3
    with pytest.raises(
        ConfigError, match=r"all 1 workers were lost before they had loaded their model .The actor died"
    ):
        Cluster(ray, config, settings, 1, kind_of(NeverThere)).describe()


def test_an_address_where_nothing_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ray auto: no cluster answers there"), connected("auto"):
        pass
