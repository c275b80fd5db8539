"""`pariskv compare`: the oracle has a ratio of 1, dense attention loses nothing, nobody has more than the oracle."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import importable, plugin
from html_page import read_page
from tiny_models import FAMILIES, SIZES, dense_generate, tiny_model
from torch import Tensor

from pariskv import ParisCache, cli, parse_config, replay
from pariskv.cli import main
from pariskv.compare import FIELDS, Comparison, Row, Settings, combine_of, config_for
from pariskv.compare_output import results_of
from pariskv.decode import Batch, decode_step, prefill
from pariskv.errors import CapacityError, ConfigError, PluginContractError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import LoadedModel
from pariskv.metrics import kl_divergence
from pariskv.registry import BUILTIN_PLUGINS, Registry
from pariskv.resolve import Retrievers
from pariskv.types import Budget, Codes, LayerInfo, Partial, Prefill, Query, Selection, Tensors

KEYS = [
    *("retriever", "attended_tokens_per_step", "candidate_recall", "recall", "mass_ratio", "output_error", "kl"),
    *("argmax_agreement", "index_bytes_per_token", "host_bytes_per_step", "prefill_seconds", "ms_per_step"),
    *("combine", "protocol"),
]
SINK, LOCAL, U, K = 4, 8, 8, 12
WINDOW = f"window: {{sink: {SINK}, local: {LOCAL}, update_interval: {U}, dense_below: 0}}\n"
SMALL = f"{WINDOW}layers: {{default: {{top_k: {K}, candidates: 0.5}}}}\n"
TOKENS, STEPS = 120, 2 * U + 3  # generated tokens enter the zone, too
WORDS = " ".join(f"w{1 + (7 * i * i + 3 * i) % 39}" for i in range(TOKENS - 8))
PROMPT = f"{WORDS}\n" + " ".join(f"w{i}" for i in range(20, 28))
GROUP = SIZES["num_attention_heads"] // SIZES["num_key_value_heads"]


class Words:
    """A tokenizer of words `w1 w2 ...`."""

    pad_token_id, eos_token_id, chat_template = 0, None, None

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[int(word[1:]) for word in text.split()])


def words_model(family: str = "llama", **changes: Any) -> LanguageModel:
    model = tiny_model(family, **changes)
    return LanguageModel(LoadedModel(model, Words(), "tiny", SIZES["max_position_embeddings"]))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return words_model()


def rows_of(
    model: LanguageModel,
    *names: str,
    config: str = SMALL,
    budgets: tuple[int, ...] = (K,),
    registry: Registry | None = None,
    text: str = PROMPT,
    **settings: Any,
) -> dict[str, Row]:
    wanted = Settings(names, budgets, **{"steps": STEPS, **settings})
    comparison = Comparison(model, parse_config(config), wanted, registry)
    return {row.retriever: row for _, row in comparison.rows(text)}


# What must hold of every table


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_one_and_dense_is_dense_in_every_family(family: str) -> None:
    rows = rows_of(words_model(family), "dense", "exact", steps=U + 1)
    assert rows["exact"].mass_ratio == pytest.approx(1.0, abs=1e-9)
    assert rows["dense"].kl < 1e-6 < rows["exact"].kl


def test_nobody_is_above_the_oracle(model: LanguageModel) -> None:
    rows = rows_of(model, "dense", "exact", "pariskv", "quest", "window", "snapkv")
    assert rows["exact"].mass_ratio == pytest.approx(1.0, abs=1e-9)
    assert (rows["exact"].recall, rows["exact"].candidate_recall) == (1.0, 1.0)
    assert rows["dense"].kl < 1e-6
    assert rows["dense"].argmax_agreement == 1.0
    # The model's norms round to float32; the layer alone does not.
    assert rows["dense"].output_error == pytest.approx(0.0, abs=1e-6)
    assert rows["dense"].attended_tokens_per_step == TOKENS + (STEPS + 1) / 2
    assert all(row.mass_ratio is not None and row.mass_ratio <= 1.0 for row in rows.values())
    for lossy in ("pariskv", "quest", "window"):
        assert rows[lossy].kl > 100 * rows["dense"].kl
        assert rows[lossy].mass_ratio < 0.999
    assert rows["window"].mass_ratio == rows["window"].recall == rows["window"].host_bytes_per_step == 0.0


def test_the_rows_keep_their_order_and_have_exactly_the_documented_fields(model: LanguageModel) -> None:
    assert list(FIELDS) == KEYS
    rows = rows_of(model, "pariskv", "dense", "exact")
    assert list(rows) == ["pariskv", "dense", "exact"]
    assert all(list(row.to_dict()) == KEYS for row in rows.values())
    assert rows["exact"].combine == "sum_softmax"
    assert rows["dense"].combine == "none"
    assert rows["exact"].attended_tokens_per_step == rows["pariskv"].attended_tokens_per_step
    row_bytes, heads, layers = 2 * 16 * 8, 2, 3
    assert rows["exact"].host_bytes_per_step == K * row_bytes * heads * layers
    assert rows["exact"].index_bytes_per_token == 16 * 8
    assert rows["dense"].index_bytes_per_token == rows["dense"].host_bytes_per_step == 0


def test_a_budget_of_the_whole_history_is_dense(model: LanguageModel) -> None:
    rows = rows_of(model, "pariskv", "exact", "snapkv", budgets=(400,), config=SMALL.replace("0.5", "1.0"))
    for row in rows.values():
        assert row.kl < 1e-6
        assert row.recall == 1.0
        assert row.mass_ratio == pytest.approx(1.0, abs=1e-9)


# What the figures are of


def test_what_the_cache_is_given_is_what_it_would_have_read(model: LanguageModel) -> None:
    row = rows_of(model, "pariskv")["pariskv"]
    ids = model.encode([PROMPT]).tokens
    answer, dense = dense_generate(model.model, ids, STEPS + 1)
    cache = ParisCache(model.model, config_for(parse_config(SMALL), "pariskv", K))
    prefill(model, cache, Batch(ids), STEPS)
    kl, agreed = [], 0
    for step in range(STEPS):
        positions = torch.tensor([[TOKENS + step]])
        logits = decode_step(model, cache, answer[:, step : step + 1], positions, None)
        kl.append(float(kl_divergence(logits, dense[:, step + 1])))
        agreed += int(logits.argmax()) == int(answer[0, step + 1])
    assert row.kl == pytest.approx(sum(kl) / STEPS, rel=1e-3)
    assert row.argmax_agreement == agreed / STEPS
    assert row.attended_tokens_per_step == cache.request.attended_tokens_per_step


def test_the_model_reads_the_prompt_once_for_all_retrievers_and_budgets(model: LanguageModel) -> None:
    read: list[int] = []
    hook = model.model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    try:
        comparison = Comparison(model, parse_config(SMALL), Settings(("pariskv", "snapkv", "dense"), (K, 2 * K), 5))
        assert [budget for budget, _ in comparison.rows(PROMPT)] == [K] * 3 + [2 * K] * 3
    finally:
        hook.remove()
    assert [count for count in read if count > 1] == [TOKENS]
    assert read.count(1) == 5 * (1 + 6)


class Watching(Retriever):
    """Remembers what `fit` saw, takes its time, and selects the zone's first tokens."""

    format = "watching"
    needs = frozenset({"query_moment", "recent_queries", "pre_rope"})
    seen: dict[int, list[Tensor]]
    seconds = 0.0
    width: int | None = None

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity)

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        time.sleep(self.seconds)
        assert prefill.query_moment is not None
        assert prefill.recent_queries is not None
        pre_rope = torch.cat(list(prefill.pre_rope_blocks(0)), dim=1)
        self.seen[layer.index] = [prefill.query_moment.clone(), prefill.recent_queries.clone(), pre_rope]
        return {}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        first = torch.arange(budget.width, dtype=torch.int32) + (self.width or 0)
        return Selection(first.expand(1, query.heads.shape[1], -1))


def registry_with(factory: Callable[[], object], name: str = "fake") -> Registry:
    def register(register: Register) -> None:
        register(name, factory)

    with importable(fake_plugin=plugin(register)) as names:
        return Registry.load((*BUILTIN_PLUGINS, *names), entry_points=False)


def watching(**attributes: Any) -> type[Watching]:
    return type("Watching", (Watching,), {"seen": {}, **attributes})


def test_a_format_is_fitted_on_what_a_prefill_would_have_shown_it(model: LanguageModel) -> None:
    ours = watching()
    rows_of(model, "fake", registry=registry_with(ours))
    theirs = watching()
    cache = ParisCache(model.model, config_for(parse_config(SMALL), "fake", K), registry_with(theirs))
    prefill(model, cache, model.encode([PROMPT]), STEPS)
    assert set(ours.seen) == set(theirs.seen) == {0, 1, 2}
    for layer, tensors in theirs.seen.items():
        for got, want in zip(ours.seen[layer], tensors, strict=True):
            torch.testing.assert_close(got, want)
            assert float(got.abs().max()) > 0


def test_the_prefills_seconds_are_the_retrievers_own(model: LanguageModel) -> None:
    slow, quick = watching(seconds=0.05), watching()
    assert rows_of(model, "fake", registry=registry_with(slow))["fake"].prefill_seconds >= 3 * 0.05
    assert rows_of(model, "fake", registry=registry_with(quick))["fake"].prefill_seconds < 3 * 0.05


def test_nobody_watches_while_the_steps_are_timed(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    observe = replay.observe

    def slow_observe(*arguments: Any) -> Any:
        time.sleep(0.2)
        return observe(*arguments)

    monkeypatch.setattr(replay, "observe", slow_observe)
    assert rows_of(model, "pariskv", steps=2)["pariskv"].ms_per_step < 200


def test_an_index_outside_of_the_zone_is_the_plugins_fault(model: LanguageModel) -> None:
    with pytest.raises(PluginContractError, match=r"the selection of layer 0 has the position 1011, but .* \d+ tokens"):
        rows_of(model, "fake", registry=registry_with(watching(width=1000)))


class Elsewhere(Watching):
    """Attends somewhere else, and fetches nothing."""

    needs = frozenset()

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        return {}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        batch, heads, group, _ = query.heads.shape
        no_slots = torch.empty(batch, heads, 0, dtype=torch.int32)
        lse = torch.zeros(batch, heads, group, dtype=query.heads.dtype)
        return Selection(no_slots, partial=Partial(torch.ones_like(query.heads), lse))


def test_what_nobody_can_know_is_null(model: LanguageModel) -> None:
    row = rows_of(model, "fake", registry=registry_with(Elsewhere))["fake"]
    unknown = {name for name, value in row.to_dict().items() if value is None}
    assert unknown == {"attended_tokens_per_step", "candidate_recall", "recall", "mass_ratio"}
    assert row.output_error is not None
    assert row.output_error > 0.1
    assert row.host_bytes_per_step == 0
    assert row.combine == "undeclared"
    results = results_of([(K, row)], {}, "one")
    assert json.loads(results.to_json())["rows"][0]["mass_ratio"] is None
    (table,) = results.tables
    assert list(table.as_rich().columns[4].cells) == ["-"]


def test_a_sample_that_is_taken_on_the_cpu_is_watched_where_it_can_be_seen(model: LanguageModel) -> None:
    more = "retrievers: {sample: {type: magicpig, bits: 4, tables: 40}, hidden: {type: magicpig, segment: 8}}\n"
    rows = rows_of(model, "sample", "hidden", config=more + SMALL)
    sample, hidden = rows["sample"], rows["hidden"]
    assert sample.mass_ratio is not None
    assert 0.1 < sample.mass_ratio <= 1.0
    assert sample.host_bytes_per_step == hidden.host_bytes_per_step == 0.0
    assert sample.combine == "per_query_head"
    # Tables of segments exist on the CPU alone.
    assert hidden.mass_ratio is None
    assert hidden.output_error is not None


# The budget


@pytest.mark.parametrize("name", ["apart", "quest"])
def test_heads_that_choose_apart_share_the_budget(model: LanguageModel, name: str) -> None:
    more = "retrievers: {apart: {type: exact, combine: per_query_head}, quest: {page_size: 2}}\n"
    row = rows_of(model, name, config=more + SMALL)[name]
    row_bytes, heads, layers = 2 * 16 * 8, 2, 3
    fetched = row.host_bytes_per_step / (row_bytes * heads * layers)
    assert K / GROUP < fetched <= 1.1 * K
    assert row.combine == "per_query_head"
    assert row.mass_ratio is not None
    assert row.mass_ratio < 1.0


def test_every_retriever_that_is_built_in_says_how_a_group_chooses() -> None:
    wanted = {
        "pariskv": "sum_softmax",
        "pariskv-paper": "mean_query",
        "exact": "sum_softmax",
        "dense": "none",
        "window": "none",
        "quest": "per_query_head",
        "pqcache": "sum_softmax",
        "magicpig": "per_query_head",
        "retroinfer": "sum_softmax",
        "shadowkv": "max_softmax",
        "snapkv": "sum_softmax",
    }
    retrievers = Retrievers(parse_config({}), Registry.load(entry_points=False))
    assert {name: combine_of(retrievers.get(name, "here")) for name in wanted} == wanted


def test_a_named_instance_of_exact_ranks_as_it_is_told(model: LanguageModel) -> None:
    more = "retrievers: {exact: {combine: max_logit}, own: {type: exact, combine: max_logit}}\n"
    rows = rows_of(model, "exact", "own", config=more + SMALL)
    assert (rows["exact"].combine, rows["own"].combine) == ("sum_softmax", "max_logit")
    assert rows["exact"].mass_ratio == pytest.approx(1.0, abs=1e-9)
    assert rows["own"].mass_ratio is not None
    assert rows["own"].mass_ratio < 0.9999


def test_ranges_that_are_dense_stay_dense_and_other_stages_go() -> None:
    layers = "{default: {rerank: exact, encode: exact, top_k: 5}, 0: {retriever: dense}, 1-2: {rerank: none}}"
    config = config_for(parse_config(f"layers: {layers}"), "quest", 7)
    assert set(config.layers) == {"default", "0"}
    assert config.layers["0"].retriever == "dense"
    default = config.layers["default"]
    assert (default.retriever, default.top_k, default.rerank, default.encode) == ("quest", 7, None, None)
    assert default.candidates == "auto"


def test_dense_layers_count_as_nothing_lost(model: LanguageModel) -> None:
    some = rows_of(model, "pariskv", config=SMALL.replace("layers: {", "layers: {0-1: {retriever: dense}, "))
    all_layers = rows_of(model, "pariskv")
    lost, lost_everywhere = 1 - some["pariskv"].recall, 1 - all_layers["pariskv"].recall  # type: ignore[operator]
    assert 0 < lost < lost_everywhere
    assert some["pariskv"].index_bytes_per_token == all_layers["pariskv"].index_bytes_per_token


# The protocol


def test_under_the_sparse_protocol_the_last_line_is_decoded(model: LanguageModel) -> None:
    read: list[int] = []
    hook = model.model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    try:
        sparse = rows_of(model, "dense", "pariskv", protocol="sparse")
    finally:
        hook.remove()
    assert max(read) == TOKENS - 8
    assert read.count(1) == 3 * (8 + STEPS)
    dense = rows_of(model, "dense", "pariskv")
    assert {row.protocol for row in sparse.values()} == {"sparse"}
    assert {row.protocol for row in dense.values()} == {"dense"}
    assert sparse["dense"].kl < 1e-6
    # The same steps are measured, over a question that carries the retriever's own errors.
    assert sparse["dense"].attended_tokens_per_step == dense["dense"].attended_tokens_per_step
    assert sparse["pariskv"].kl != dense["pariskv"].kl


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"text": "w1 w2 w3"}, ConfigError, r"has 3 tokens, all of which .* give it 20 at least"),
        ({"text": WORDS, "protocol": "sparse"}, ConfigError, "has one line only"),
        ({"text": "\n" + WORDS, "protocol": "sparse"}, ConfigError, "has one line only"),
        ({"steps": 9000}, CapacityError, r"has 120 tokens and 9000 are decoded after it, but the .* context is 8192"),
        ({"steps": 0}, ConfigError, "--steps: got 0"),
        ({"protocol": "half"}, ConfigError, "--question: got 'half', wanted one of dense, sparse"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    model: LanguageModel, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rows_of(model, "dense", **arguments)


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{name: {folder}}}\nquickstart: {{prompt_tokens: 300}}\n{SMALL}")
    return path


def pariskv(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


REFUSED = {
    "unknown": (
        ["--retrievers", "dense,pariskw"],
        r"--retrievers: unknown retriever 'pariskw' \(did you mean 'pariskv'",
    ),
    "twice": (["--retrievers", "dense,dense"], "'dense' is listed twice"),
    "nothing to select with": (["--retrievers", "resident"], "no retriever implements coarse_select"),
    "no budget": (["--retrievers", "dense", "layers.default.top_k=0"], "top_k=0, wanted at least 1"),
    "a budget that is none": (["--retrievers", "dense", "--top-k", "8,x"], "--top-k: got 'x'"),
    "a picture of no kind": (
        ["--retrievers", "dense", "--plot", "plot.xyz"],
        r"--plot plot\.xyz: wanted a file .* svg",
    ),
    "a folder that is not there": (["--retrievers", "dense", "--plot", "no/p.svg"], "folder .*no does not exist"),
    "no retrievers": ([], "--retrievers"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_said_before_a_model_is_looked_for(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"model: {{name: no/such-model}}\n{SMALL}")
    assert pariskv("compare", tmp_path / "config.yaml", *arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"model: {{name: no/such-model}}\n{SMALL}")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert pariskv("compare", tmp_path / "config.yaml", "--retrievers", "dense", "--plot", tmp_path / "p.svg") == 2
    assert "pip install 'pariskv[plots]'" in capsys.readouterr().err


# The command


def test_json_is_a_manifest_and_the_rows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", config, "--retrievers", "pariskv,exact,dense", "--steps", "4", "--json"]
    assert pariskv(*command, "--top-k", "16", "--question", "sparse") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert set(found) == {"manifest", "rows"}
    assert found["manifest"]["calibration"] is None
    assert [list(row) for row in found["rows"]] == [KEYS] * 3
    rows = {row["retriever"]: row for row in found["rows"]}
    assert list(rows) == ["pariskv", "exact", "dense"]
    assert rows["exact"]["mass_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert rows["dense"]["kl"] < 1e-6
    assert all(row["mass_ratio"] <= 1 for row in rows.values())
    assert {row["protocol"] for row in rows.values()} == {"sparse"}
    assert found["manifest"]["command"] == "compare"
    assert found["manifest"]["arguments"]["top_k"] == "16"
    assert found["manifest"]["config"]["window"]["sink"] == SINK


def test_the_table_has_a_line_for_each_retriever(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text(WORDS)
    command = ["compare", config, "--retrievers", "own,dense", "--steps", "3", "--prompt-file", tmp_path / "prompt.txt"]
    config.write_text(config.read_text() + "retrievers: {own: {type: quest, page_size: 2}}\n")
    assert pariskv(*command) == 0
    shown = capsys.readouterr().out
    assert f"K = {K} rows per key/value head and step" in shown
    assert re.search(r"│ own .* per_query_head │ dense", shown)
    assert re.search(r"│ dense .* 1\.000 .* none", shown)


def test_a_plot_and_a_page_draw_every_budget(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, report = tmp_path / "quality.svg", tmp_path / "quality.html"
    files = ["--plot", picture, "--report", report]
    assert pariskv("compare", config, "--retrievers", "pariskv,exact", "--steps", "2", "--json", *files) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["retriever"] for row in rows] == ["pariskv", "exact"] * 4
    attended = [row["attended_tokens_per_step"] for row in rows if row["retriever"] == "exact"]
    assert [after - before for before, after in pairwise(attended)] == [32, 64, 128]
    text = picture.read_text()
    assert text.startswith("<?xml")
    assert len(re.findall(r'id="axes_\d+"', text)) == 3
    page = read_page(report.read_text())
    assert page.tags.count("svg") == 3
    assert page.tags.count("table") == 4
    assert all(f"{row['mass_ratio']:.3f}" in page.texts for row in rows)
    assert {"#mass_ratio", "#recall", "#kl"} <= set(page.links)


def test_an_interruption_keeps_the_rows_that_there_are(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Comparison.rows

    def interrupted(self: Comparison, *arguments: Any) -> Iterator[tuple[int, Row]]:
        yield next(rows(self, *arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "rows", interrupted)
    assert pariskv("compare", config, "--retrievers", "dense,exact", "--steps", "2", "--json") == cli.INTERRUPTED
    assert [row["retriever"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["dense"]
