"""The configurations of the paper's benchmarks: each is a whole command."""

from __future__ import annotations

from pathlib import Path

import pytest

from pariskv.binding import bind
from pariskv.config import load_config
from pariskv.evaluation.tasks.evaluation import Settings, check_retrievers
from pariskv.registry import Registry

FILES = sorted((Path(__file__).parents[2] / "configs/paper").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_of_the_paper_binds_and_names_its_task(file: Path) -> None:
    config, registry = load_config(file, []), Registry.load(entry_points=False)
    assert len(bind(config, 36, registry)) == 36
    settings = Settings(tuple(config.evaluation.tasks), tuple(config.evaluation.retrievers))
    assert settings.retrievers[0] == "dense"
    check_retrievers(config, settings.retrievers, registry)
    assert file.stem.endswith(settings.tasks[0].removesuffix("_diamond").removesuffix("_cot"))


def test_every_benchmark_has_one() -> None:
    tasks = {task for file in FILES for task in load_config(file, []).evaluation.tasks}
    assert tasks == {"ruler", "longbench2_cot", "gpqa_diamond", "math500", "aime25"}
