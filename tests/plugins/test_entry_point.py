"""A plugin that is a file and an entry point in some folder: found, chosen by YAML, mixed with pariskv's rerank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import install
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache
from pariskv.config import load_config
from pariskv.errors import ConfigError
from pariskv.registry import Registry
from pariskv.testing import check_retriever
from pariskv.types import Selection
from tests.plugins.driving import generated

ROOT = Path(__file__).parents[2]

PLUGIN = """
from dataclasses import dataclass

import torch

from pariskv import Retriever, Selection, hookimpl


@dataclass(frozen=True)
class Options:
    skip: int = 0  # newest tokens of the zone that are never candidates


class Newest(Retriever):
    def __init__(self, options):
        self.skip = options.skip

    @hookimpl
    def coarse_select(self, query, codes, budget):
        slots = torch.arange(budget.width, device=budget.count.device)
        tokens = codes.length.unsqueeze(1) - 1 - self.skip - slots
        used = (slots < budget.count.unsqueeze(1)) & (tokens >= 0)
        tokens = torch.where(used, tokens, -1).int()
        return Selection(tokens.unsqueeze(1).expand(-1, query.heads.shape[1], -1))


@hookimpl
def register_retrievers(register):
    register("newest", Newest, options=Options)
"""

YAML = """
retrievers:
  mine: {type: newest, skip: 3}
layers:
  default: {retriever: mine, rerank: pariskv, candidates: 20, top_k: 6}
  0: {retriever: dense}
window: {sink: 4, local: 8, update_interval: 8, dense_below: 0}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The plugin, its metadata and the YAML; nothing is installed."""
    install(tmp_path, "newest-kv", "newest", PLUGIN)
    (tmp_path / "mixed.yaml").write_text(YAML)
    return tmp_path


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder on sys.path."""
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("newest_module", None)


def test_its_candidates_are_reranked_by_pariskv_in_a_model(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), prompt(90)
    cache = ParisCache(model, load_config(site / "mixed.yaml"))
    pipeline = cache.request.pipelines[1]
    assert (pipeline.names["coarse_select"], pipeline.names["rerank"]) == ("mine", "pariskv")
    assert (pipeline.coarse_codes, pipeline.rerank_codes) == (None, "pariskv")
    assert cache.request.pipelines[0].coarse_select is None

    seen: list[Tensor] = []

    def watched(tokens: Tensor) -> Selection:
        seen.append(tokens[0, 0])
        return Selection(tokens)

    monkeypatch.setattr(sys.modules["newest_module"], "Selection", watched)
    tokens, cache = generated(model, ids, load_config(site / "mixed.yaml"), 24)
    assert tokens.shape == (1, 24)
    assert len(seen) == 2 * 23  # layers that retrieve, steps after the prefill
    assert seen[0].tolist() == list(range(68, 48, -1))  # the zone has 72 tokens, the last three are skipped
    layer = cache.request.layers[1]
    assert layer.zones == [96]
    assert layer.selected.sum() == 23 * 2 * 6  # of 20 candidates the best 6, in both heads


def test_with_a_budget_of_everything_it_is_dense_attention(site: Path) -> None:
    overrides = ["retrievers.mine.skip=0", "layers.default.top_k=400", "layers.default.candidates=1.0"]
    model, ids = tiny_model("llama"), prompt(90)
    tokens, cache = generated(model, ids, load_config(site / "mixed.yaml", overrides), 24)
    assert torch.equal(tokens, dense_generate(model, ids, 24)[0])
    assert cache.request.layers[1].zones == [96]


def test_it_is_checked_like_any_other(site: Path) -> None:
    registry = Registry.load()
    check_retriever(registry.make("newest", {}), lengths=(130, 16, 0))
    assert registry.origin("newest") == "newest-kv 1.2"
    with pytest.raises(ConfigError, match=r"retrievers\.newest\.skp: unknown key \(did you mean 'skip'\?\)"):
        registry.make("newest", {"skp": 3})


def pariskv(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which has the folder on its path."""
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "plugins", ROOT / "kernels")))
    command = [sys.executable, "-c", "from pariskv.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_command_line_lists_it(folder: Path) -> None:
    done = pariskv(folder, "plugins", "--json")
    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["newest"] == {
        "name": "newest",
        "distribution": "newest-kv",
        "version": "1.2",
        "stages": ["coarse_select"],
        "format": None,
        "error": None,
    }
    assert set(rows) > set(Registry.load(entry_points=False).names())


def test_the_command_line_validates_its_options(folder: Path) -> None:
    done = pariskv(folder, "config", "validate", "mixed.yaml", "retrievers.mine.skip=few")
    assert done.returncode == 2
    assert done.stderr.startswith("error: retrievers.mine.skip: got 'few'")
