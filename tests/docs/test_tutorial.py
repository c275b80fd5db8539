"""The tutorial `write-a-retriever`, run as it is written: its files are laid out, found, bound and generate."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pariskv
from pariskv.binding import bind
from pariskv.cli import main
from pariskv.config import load_config, parse_config
from pariskv.registry import Registry
from pariskv.types import LayerInfo
from tests.docs.fences import blocks

FILES = {block.title: block.text for block in blocks("write-a-retriever") if block.title}
PLUGINS = ("spread", "pages", "principal", "count")


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tutorial's folder: every file of the page, and the plugins laid out by the page's own commands."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = next(block.text for block in blocks("write-a-retriever", "bash") if "dist-info" in block.text)
    lay_out = "".join(line for line in commands.splitlines(keepends=True) if "pariskv plugins" not in line)
    for name in PLUGINS:
        subprocess.run(["sh", "-euc", lay_out.replace("spread", name)], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "trial")
    yield tmp_path
    for name in PLUGINS:
        sys.modules.pop(name, None)


def command(line: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(line.split())
    assert isinstance(done.value.code, int)
    return done.value.code


def test_the_first_retriever_has_twelve_lines() -> None:
    lines = [line for line in FILES["spread.py"].splitlines() if line.strip()]
    assert len(lines) == 12


def test_the_plugins_are_listed_from_a_folder_with_a_dist_info(trial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plugins") == 0
    listed = capsys.readouterr().out
    assert "spread" in listed
    assert "pages-16" in listed
    assert "count" in listed


@pytest.mark.parametrize("name", ["spread.yaml", "mixed.yaml", "pages.yaml"])
def test_the_configurations_are_valid(trial: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"config validate {name}") == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["spread.yaml", "mixed.yaml", "pages.yaml"])
def test_the_trial_generates(trial: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(FILES["try_it.py"].replace("spread.yaml", name), "try_it.py", "exec"), {})
    assert capsys.readouterr().out.split("\n")[-2] == "torch.Size([2, 540]) [480, 480]"


def test_with_a_top_k_of_the_whole_zone_the_retrievers_agree_with_dense_attention(trial: Path) -> None:
    from tiny_models import dense_generate, prompt, tiny_model

    model, ids = tiny_model("llama"), prompt(150, batch=2)
    wanted, _ = dense_generate(model, ids, 40)
    for name in ("spread", "pages", "principal"):
        settings = load_config(Path("spread.yaml"), [f"layers.default.retriever={name}", "layers.default.top_k=1000"])
        cache = pariskv.ParisCache(model, settings)
        got = model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=40, min_new_tokens=40, pad_token_id=0
        )
        assert torch.equal(got[:, 150:], wanted)
        assert cache.request.layers[0].zones == [128, 128]


def test_spread_takes_evenly_spaced_tokens_and_pads_with_minus_one(trial: Path) -> None:
    import spread

    info = LayerInfo(0, 2, 3, 2, 4, torch.float32, torch.device("cpu"), 0.5)
    codes = pariskv.Codes.empty(info, 20)
    codes.length += torch.tensor([12, 3], dtype=torch.int32)
    query = pariskv.Query(torch.zeros(2, 3, 2, 4), None, 0.5)
    budget = pariskv.Budget(4, torch.tensor([4, 3], dtype=torch.int32))
    chosen = spread.Spread().coarse_select(query, codes, budget).indices
    assert chosen.shape == (2, 3, 4)
    assert chosen.dtype == torch.int32
    assert chosen[:, 0].tolist() == [[0, 3, 6, 9], [0, 1, 2, -1]]


def test_pages_bounds_every_key_of_a_page_and_does_not_depend_on_the_split(trial: Path) -> None:
    import pages

    keys = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    retriever = pages.Pages(pages.Options())
    whole = retriever.encode(keys, keys, {})
    parts = [retriever.encode(part, part, {}) for part in keys.split(16, dim=2)]
    for name, field in whole.items():
        assert torch.equal(field, torch.cat([part[name] for part in parts], dim=2))
    query = torch.randn(1, 2, 1, 8)
    bound = torch.maximum(query * whole["low"], query * whole["high"]).sum(-1).repeat_interleave(16, dim=-1)
    assert bool((bound >= (query * keys).sum(-1) - 1e-5).all())


def test_the_wrapper_sees_every_call(trial: Path) -> None:
    import count
    from tiny_models import prompt, tiny_model

    model, ids = tiny_model("llama"), prompt(100)
    settings = load_config(Path("spread.yaml"), ["wrappers=[count]"])
    cache = pariskv.ParisCache(model, settings)
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    assert count.Count.calls == 4 * 3  # steps after the prefill x layers


def test_the_retrievers_keep_the_contract(trial: Path) -> None:
    exec(compile(FILES["check.py"], "check.py", "exec"), {})


def test_the_pyproject_makes_a_wheel_with_the_entry_point(trial: Path) -> None:
    build = pytest.importorskip("hatchling.build", reason="building the wheel needs hatchling (the dev extra)")
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    assert project["entry-points"] == {"pariskv": {"spread": "spread"}}
    with zipfile.ZipFile(trial / build.build_wheel(str(trial))) as wheel:
        assert "spread.py" in wheel.namelist()
        (entries,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "[pariskv]\nspread = spread" in wheel.read(entries).decode()


def test_a_range_with_spread_alone_is_still_reranked_by_the_default(trial: Path) -> None:
    config = parse_config("layers: {default: {retriever: pariskv}, 1: {retriever: spread}}")
    names = bind(config, 2, Registry.load())[1].names
    assert (names["coarse_select"], names["rerank"]) == ("spread", "pariskv")
