"""The benchmark commands: what their rows hold, how they refuse, and the arithmetic behind them.

The measurements run on a CPU here, at tiny sizes, with a timer that only counts; the marked tests run the
commands themselves on a GPU.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pariskv_plugins.resident import ResidentStore
from rich.console import Console

from pariskv import filling, resolve
from pariskv.bench import batching, decode, dense, fetch, kernels, layer, memory, retrievers, room, synthetic, timing
from pariskv.bench.cli import RETRIEVERS
from pariskv.bench.manifest import git_revision, make_manifest
from pariskv.bench.output import FIELDS, Result, as_markdown, as_table, make_row, read_json, write_json
from pariskv.bench.plots import latency, plot, throughput
from pariskv.bench.room import reason
from pariskv.bench.timing import MOST_LAYERS, EagerTimer, bus_bandwidth, copy_bandwidth, layers_to_cycle
from pariskv.cli import main
from pariskv.errors import BindingError, CapacityError, ConfigError
from pariskv.integrations.shapes import SHAPES
from pariskv.types import LayerInfo
from pariskv.units import parse_bytes, parse_candidates, parse_count, parse_tokens, show_tokens

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
TINY = {"kv_heads": 2, "group": 2, "head_dim": 64, "dtype": torch.float32}
TINY_MODEL = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class Counting:
    """A timer that makes the calls and says that each took 10 microseconds."""

    device = CPU
    l2_bytes = 100
    runs = 3

    def __init__(self) -> None:
        self.counts: list[int] = []

    def seconds(self, calls: Sequence[Callable[[], object]], before: Callable[[int], object] | None = None) -> float:
        self.counts.append(len(calls))
        for run in range(self.runs):
            if before is not None:
                before(run)
            for call in calls:
                call()
        return 1e-5


def pariskv(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def result(kind: str, *rows: dict[str, Any]) -> Result:
    return Result(make_manifest(kind, {"tokens": "128K"}), [make_row(kind, **row) for row in rows])


LAYER_ROW = {
    "tokens": 131072, "batch": 1, "top_k": 100, "store": "uva", "overlap": 0.7, "us": 70.04, "dense_us": 140.08,
    "ratio": 0.5,
}  # fmt: skip
DECODE_ROW = {
    "shape": "llama3-8b", "tokens": 131072, "batch": 6, "store": "uva", "tokens_per_s": 600.0,
    "dense_tokens_per_s": 300.0,
}  # fmt: skip


# What a run says of itself


def test_the_manifest_says_where_and_with_what_it_ran() -> None:
    config = synthetic.bench_config("resident", 100, "auto")
    found = json.loads(json.dumps(make_manifest("layer", {"tokens": "32K"}, config)))
    assert found["command"] == "layer"
    assert found["arguments"] == {"tokens": "32K"}
    assert found["config"]["layers"]["default"]["top_k"] == 100
    assert found["date"].endswith("+00:00")
    assert set(found["versions"]) == {
        "python", "pariskv", "torch", "numba", "numba-cuda", "cuda-python", "transformers",
    }  # fmt: skip
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(found["hardware"]) == {"gpu", "gpu_memory_bytes", "driver", "cuda", "cpu", "cores", "memory_bytes"}
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1 << 20
    assert (found["hardware"]["gpu"] is None) == (not ON_GPU)


def test_a_folder_that_is_no_checkout_has_no_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None


def test_rows_carry_exactly_the_fields_of_the_documentation() -> None:
    assert set(FIELDS) == {"kernels", "layer", "decode", "retrievers", "memory", "batching"}
    assert list(make_row("memory", bytes=8)) == ["bytes", "seconds", "gb_per_s", "fallback_gb_per_s"]
    assert make_row("memory", "no room", bytes=8) == {
        "bytes": 8, "seconds": None, "gb_per_s": None, "fallback_gb_per_s": None, "why": "no room",
    }  # fmt: skip
    with pytest.raises(AssertionError, match="rows have no"):
        make_row("memory", tokens=1)


def test_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = result("layer", LAYER_ROW)
    write_json(tmp_path / "layer.json", written)
    assert set(json.loads((tmp_path / "layer.json").read_text())) == {"manifest", "rows"}
    assert read_json(tmp_path / "layer.json") == written


@pytest.mark.parametrize("text", ["[]", "{", '{"manifest": {"command": "run"}, "rows": []}', '{"manifest": {}}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json: "):
        read_json(tmp_path / "other.json")


def test_markdown_shows_values_as_people_read_them() -> None:
    found = result("layer", LAYER_ROW, {**LAYER_ROW, "store": "resident", "us": None, "ratio": None})
    found.rows[1]["why"] = "resident: a|b"
    found.manifest["measured"]["dense"] = [
        {"tokens": 131072, "batch": 1, "backend": "cudnn", "us": {"flash": 150.0, "cudnn": 140.08}}
    ]
    lines = as_markdown(found).splitlines()
    assert lines[0].startswith("`pariskv bench layer` on ")
    assert lines[0].endswith(": tokens 128K")
    assert lines[2:6] == [
        "| tokens | batch | top k | store | overlap | µs | dense µs | ratio | why |",
        "| ---: | ---: | ---: | :--- | ---: | ---: | ---: | ---: | :--- |",
        "| 128K | 1 | 100 | uva | 0.70 | 70.0 | 140.1 | 0.50 | - |",
        "| 128K | 1 | 100 | resident | 0.70 | - | 140.1 | - | resident: a\\|b |",
    ]
    assert lines[-1] == "Dense at 128K tokens, batch 1: cudnn (flash 150.0 µs, cudnn 140.1 µs)."
    assert as_table(found).row_count == 2


@pytest.mark.parametrize("kind", FIELDS)
def test_a_result_without_rows_can_be_shown(kind: str) -> None:
    assert as_table(result(kind)).row_count == 0
    assert f"pariskv bench {kind}" in as_markdown(result(kind))


def test_brackets_in_a_reason_are_shown_as_they_are() -> None:
    table = as_table(Result(make_manifest("memory", {}), [make_row("memory", "[bold] failed", bytes=8)]))
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table)
    assert "[bold] failed" in shown.get()


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_is_explained_on_the_page(kind: str) -> None:
    sections = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8").split("\n## ")
    (section,) = [section for section in sections if section.startswith(f"`pariskv bench {kind}`")]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert [name for name in FIELDS[kind] if f"`{name}`" not in cells] == []


# Sizes


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_tokens(text) for text in ("32768", "32K", "1M", "0.5m")] == [32768, 32768, 1 << 20, 1 << 19]
    assert [parse_bytes(text) for text in ("80GB", "1 GiB", "512")] == [80 * 10**9, 1 << 30, 512]
    assert [parse_candidates(text) for text in ("auto", "0.025", "1024")] == ["auto", 0.025, 1024]
    assert [show_tokens(count) for count in (131072, 1 << 20, 1000)] == ["128K", "1M", "1000"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_tokens, "128G"),
        (parse_tokens, "0"),
        (parse_tokens, ""),
        (parse_tokens, "1.5"),
        (parse_bytes, "80"[:0]),
        (parse_bytes, "80TB"),
        (parse_count, "1K"),
        (parse_candidates, "2.0"),
        (parse_candidates, "many"),
    ],
)
def test_a_size_that_is_none_is_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"got .*{text}"):
        parse(text)


def test_layers_are_added_until_their_data_exceed_four_times_the_l2() -> None:
    assert layers_to_cycle(100, 1000) == 41
    assert layers_to_cycle(4001, 1000) == 1
    assert layers_to_cycle(4000, 1000) == 2
    assert layers_to_cycle(1, 1000) == MOST_LAYERS


def test_bandwidths_count_both_ways_of_a_copy_and_one_of_the_bus() -> None:
    timer = Counting()
    assert copy_bandwidth(timer, 1000) == pytest.approx(2000 / 1e-5)
    assert bus_bandwidth(timer, 1000) == pytest.approx(1000 / 1e-5)


def test_a_failure_for_want_of_memory_is_told_in_a_few_words() -> None:
    torch_says = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB\nand more"
    assert reason(torch.OutOfMemoryError(torch_says)) == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert reason(MemoryError()) == "MemoryError"


def test_eager_calls_are_timed_apart_and_the_first_runs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticking:
        """Says that the nth piece of work took n seconds."""

        def __init__(self, device: torch.device):
            self.seconds: list[float] = []

        @contextmanager
        def running(self) -> Iterator[None]:
            yield
            self.seconds.append(len(self.seconds))

    monkeypatch.setattr(timing, "Clock", Ticking)
    done: list[object] = []
    timer = EagerTimer(CPU, steps=3, warm_up=2)
    assert timer.seconds([lambda: done.append("a"), lambda: done.append("b")], done.append) == 6.5  # of 4 to 9
    assert done == [one for run in range(5) for one in (run, "a", "b")]
    assert layers_to_cycle(1, timer.l2_bytes) == 1


# Synthetic layers


def test_the_rotary_embedding_can_be_undone_and_keeps_distances() -> None:
    rotary, keys = filling.PlainRotary(64, CPU), torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 7, 1000, 100_000], [3, 4, 10, 1003, 100_003]])
    turned = rotary.rotate(keys, positions)
    torch.testing.assert_close(rotary.unrotate(turned, positions), keys, rtol=0, atol=1e-5)  # float32
    assert torch.equal(turned[0, :, 0], keys[0, :, 0])
    same = rotary.rotate(keys[:1].expand(2, -1, -1, -1), positions)
    products = same @ same.mT
    torch.testing.assert_close(products[0, :, :4, :4], products[1, :, :4, :4], rtol=0, atol=1e-3)  # angles near 1000


def test_a_fill_gives_queries_to_those_who_learn_from_them() -> None:
    settings = retrievers.Settings(("snapkv",), (2500,), (1,), 16, "auto", **TINY)
    one = filling.filled_layer(settings.info(0, 1, CPU), *settings.pipeline("snapkv", 2500, CPU), 2500)
    kept = one.zone.states["snapkv"]["kept"]
    assert kept.shape == (1, 2, 16)
    assert kept.max() > 100  # without votes it would be the first 16


# Consecutive steps


@pytest.mark.parametrize(("share", "count"), [(0.7, 10), (0.7, 33), (0.0, 5), (1.0, 5)])
def test_index_lists_overlap_by_exactly_the_share_that_was_asked_for(share: float, count: int) -> None:
    steps = synthetic.overlapping_indices((2, 3), count, 100, share, 4, CPU)
    assert steps.shape == (4, 2, 3, count)
    assert steps.dtype == torch.int32
    for chosen in steps.flatten(0, 2):
        assert len(set(chosen.tolist())) == count
        assert chosen.tolist() == sorted(chosen.tolist())
        assert 0 <= chosen[0] <= chosen[-1] < 100
    for before, after in pairwise(steps.flatten(1, 2)):
        shared = [len({*a.tolist()} & {*b.tolist()}) for a, b in zip(before, after, strict=True)]
        assert shared == [round(share * count)] * 6
    assert synthetic.mean_overlap(list(steps)) == pytest.approx(round(share * count) / count)


def test_index_lists_need_enough_tokens() -> None:
    with pytest.raises(ValueError, match="tokens: wanted at least 13"):
        synthetic.overlapping_indices((1,), 10, 12, 0.7, 2, CPU)


def test_overlap_does_not_count_empty_slots() -> None:
    before = torch.tensor([[1, 5, 9, -1]], dtype=torch.int32)
    after = torch.tensor([[5, 2, -1, -1]], dtype=torch.int32)
    assert synthetic.overlap(before, after) == 0.5
    assert synthetic.overlap(before, torch.full_like(after, -1)) == 0.0


def test_queries_keep_their_length_and_are_correlated_as_mixed() -> None:
    info = LayerInfo(0, 1, 4, 4, 256, torch.float32, CPU, 1.0)
    queries = synthetic.query_sequence(info, 0.8, 40)
    assert queries.shape == (40, 1, 4, 4, 256)
    assert queries.std().item() == pytest.approx(1.0, abs=0.02)
    correlation = torch.nn.functional.cosine_similarity(queries[1:], queries[:-1], dim=-1).mean().item()
    assert correlation == pytest.approx(0.8, abs=0.02)


def test_the_mixture_is_found_by_what_is_measured() -> None:
    assert synthetic.mix_for_overlap(lambda mix: mix**2, 0.49) == pytest.approx(0.7, abs=1e-3)


def test_a_filled_layer_overlaps_more_the_more_the_queries_stay() -> None:
    pipeline, window = synthetic.bench_pipeline(synthetic.bench_config("resident", 32, "auto"), CPU)
    one = filling.filled_layer(LayerInfo(0, 1, 2, 2, 64, torch.float32, CPU, 0.125), pipeline, window, 3000)
    assert one.retrieves
    assert one.lengths == [3000]
    measured = [layer._overlap_at(one, mix) for mix in (0.0, 0.9, 1.0)]
    assert measured[0] < measured[1] < measured[2] == 1.0
    mix = synthetic.mix_for_overlap(lambda mix: layer._overlap_at(one, mix), 0.7)
    assert layer._overlap_at(one, mix) == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize("store", synthetic.STORES)
def test_every_store_is_a_retriever_with_the_options_that_its_name_says(store: str) -> None:
    pipeline, window = synthetic.bench_pipeline(synthetic.bench_config(store, 100, 0.025), CPU)
    assert pipeline.names["fetch"] == pipeline.names["update"] == store.split()[0]
    assert pipeline.candidates.count(1000, 10) == 25
    assert window.sink == 64


# Rows, measured on a CPU by a timer that counts


def test_dense_takes_the_faster_backend_and_cycles_through_layers() -> None:
    timer = Counting()
    found = dense.time_dense(timer, LayerInfo(0, 1, 2, 2, 64, torch.float32, CPU, 0.125), 50)
    assert timer.counts[0] == 1  # 51,200 bytes of keys and values exceed 4 x 100
    assert found.backend in found.us
    assert found.best_us == 10.0
    assert dense.Dense({"flash": 2.0, "cudnn": 1.0}).backend == "cudnn"
    assert dense.Dense().best_us is None


def test_layer_rows_have_every_combination_and_say_what_they_overlap() -> None:
    settings = layer.Settings((2500,), (1, 2), (16, 32), ("resident",), "auto", **TINY)
    measured: dict[str, Any] = {}
    rows = list(layer.measure(settings, Counting(), measured))
    assert len(rows) == settings.num_rows == 4
    assert [(row["batch"], row["top_k"]) for row in rows] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    for row in rows:
        assert tuple(row) == FIELDS["layer"]
        assert (row["us"], row["dense_us"], row["ratio"]) == (10.0, 10.0, 1.0)
        assert 0.5 < row["overlap"] < 0.9
        assert row["hit_rate"] is None
    assert [(one["tokens"], one["batch"]) for one in measured["dense"]] == [(2500, 1), (2500, 2)]


OTHER = ("layers.default.retriever=other",)


@pytest.mark.parametrize(
    "rows",
    [
        layer.measure(layer.Settings((2500,), (1,), (16,), ("resident",), "auto", overrides=OTHER), Counting(), {}),
        decode.measure(
            decode.Settings(
                "tiny", TINY_MODEL, (300,), (1,), ("resident",), 16, "auto", False, False, 2, overrides=OTHER
            ),
            Counting(),
            {},
        ),
        batching.measure(
            batching.Settings("tiny", TINY_MODEL, 4, 30, 90, (2,), ("resident",), 8, 16, "auto", False, OTHER), CPU
        ),
    ],
    ids=["layer", "decode", "batching"],
)
def test_overrides_reach_what_is_measured(rows: Iterator[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="unknown retriever 'other'"):
        next(rows)


@pytest.mark.parametrize(
    "override", ["store=uva", "retrievers.uva.reuse=true", "layers.default.top_k=5", "runtime.graph=off"]
)
def test_an_override_of_what_an_option_sets_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=f"{override}: here .* is set by --"):
        synthetic.bench_config("resident", 16, "auto", [override])


def test_the_hit_rate_counts_the_timed_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reusing(ResidentStore):
        counts: torch.Tensor

        @property
        def hit_rate(self) -> float:
            return self.counts[0].item() / max(1, self.counts[1].item())

    fill = layer.filled_layer

    def filled(*arguments: Any) -> Any:
        made = fill(*arguments)
        made.store.__class__ = Reusing
        made.store.counts = torch.tensor([9, 9])  # of the calibration
        return made

    monkeypatch.setattr(layer, "filled_layer", filled)
    monkeypatch.setattr(layer, "bench_config", lambda store, *others: synthetic.bench_config("resident", *others))
    (row,) = layer.measure(layer.Settings((2500,), (1,), (16,), ("uva reuse",), "auto", **TINY), Counting(), {})
    assert row["hit_rate"] == 0.0


def test_a_layer_that_does_not_fit_says_why_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = layer.Settings((2500,), (1, 2), (16,), ("resident",), "auto", **TINY)
    fill = layer.filled_layer

    def too_large(info: LayerInfo, *others: Any) -> object:
        if info.batch == 1:
            raise CapacityError("needs 9 GB, 1 GB are free")
        return fill(info, *others)

    monkeypatch.setattr(layer, "filled_layer", too_large)
    first, second = layer.measure(settings, Counting(), {})
    assert first["why"] == "resident: needs 9 GB, 1 GB are free"
    assert (first["us"], first["ratio"], first["dense_us"]) == (None, None, 10.0)
    assert "why" not in second


LINE_UP = tuple(RETRIEVERS.split(","))


def test_every_method_has_a_row_with_what_was_captured_and_what_was_not() -> None:
    settings = retrievers.Settings(LINE_UP, (2500,), (1,), 16, "auto", steps=2, **TINY)
    timer, measured = Counting(), {}  # type: Counting, dict[str, Any]
    rows = {row["retriever"]: row for row in retrievers.measure(settings, timer, measured)}
    assert tuple(rows) == LINE_UP
    assert len(rows) == settings.num_rows
    assert [name for name, row in rows.items() if not row["captured"]] == ["pqcache", "magicpig"]
    for row in rows.values():
        assert tuple(row) == FIELDS["retrievers"]
        assert (row["tokens"], row["batch"], row["top_k"], row["dense_us"]) == (2500, 1, 16, 10.0)
        assert (row["us"] == 10.0) == row["captured"]
        assert row["ratio"] == pytest.approx(row["us"] / 10.0)
        assert row["fill_s"] > 0
    # float32 and a head size of 64: what algorithms.md has for 128 in bf16, and MagicPIG's copy of keys and values
    size = {name: row["index_bytes_per_token"] for name, row in rows.items()}
    assert {name: size[name] for name in ("pariskv", "quest", "pqcache", "magicpig", "window")} == {
        "pariskv": 57.0, "quest": 32.0, "pqcache": 2.0, "magicpig": 2 * 150 + 2 * 256 + 4.0, "window": 0.0,
    }  # fmt: skip
    assert [one["tokens"] for one in measured["dense"]] == [2500]


def test_methods_are_placed_as_published_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "GPU_MODULES", ())
    settings, device = retrievers.Settings(LINE_UP, (1 << 20,), (1,), 100, "auto"), torch.device("cuda")
    found = {}
    for name in LINE_UP:
        pipeline, _ = settings.pipeline(name, 1 << 20, device)
        method = retrievers.published(name, 1 << 20, 100)
        found[name] = pipeline.graph_safe, retrievers.placement(method, pipeline, device)
    assert found == {
        "pariskv": (True, "index GPU, rows host (read by the GPU), attention GPU"),
        "quest": (True, "index GPU, rows GPU, attention GPU"),
        "pqcache": (False, "index GPU, rows host (gathered by the CPU), attention GPU"),
        "retroinfer": (True, "index GPU, rows host (read by the GPU), attention GPU"),
        "shadowkv": (True, "index, low-rank keys GPU, values host (read by the GPU), attention GPU"),
        "magicpig": (False, "index, rows, attention CPU"),
        "snapkv": (True, "index GPU, rows GPU, attention GPU"),
        "window": (True, "no index, rows dropped, attention GPU"),
    }


def test_magicpig_has_tables_for_long_histories_and_leaves_in_whole_segments() -> None:
    settings = retrievers.Settings(("magicpig",), (1 << 20,), (1,), 100, "auto")
    pipeline, window = settings.pipeline("magicpig", 1 << 20, CPU)
    assert (pipeline.block, window.update) == (8192, 8192)
    assert settings.pipeline("magicpig", 1 << 16, CPU)[0].block == 1


def test_heads_that_choose_apart_share_the_rows() -> None:
    settings = retrievers.Settings(("quest",), (2500,), (1,), 32, "auto", **TINY)
    pipeline, window = settings.pipeline("quest", 2500, CPU)
    assert pipeline.slots(settings.group) == 32
    one = filling.filled_layer(settings.info(0, 1, CPU), pipeline, window, 2500)
    (heads,) = synthetic.query_sequence(one.info, 0.0, 1)
    chosen = synthetic.selected_indices(one, heads)
    assert 16 <= (chosen >= 0).sum(-1).min() <= (chosen >= 0).sum(-1).max() <= 32


def test_a_method_that_does_not_fit_says_why_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = retrievers.filled_layer

    def too_large(info: LayerInfo, pipeline: Any, *others: Any) -> object:
        if pipeline.names["coarse_select"] == "pqcache":
            raise CapacityError("needs 9 GB, 1 GB are free")
        return fill(info, pipeline, *others)

    monkeypatch.setattr(retrievers, "filled_layer", too_large)
    settings = retrievers.Settings(("pqcache", "window"), (2500,), (1,), 16, "auto", **TINY)
    first, second = retrievers.measure(settings, Counting(), {})
    assert first["why"] == "pqcache: needs 9 GB, 1 GB are free"
    assert (first["us"], first["ratio"], first["fill_s"], first["captured"]) == (None, None, None, False)
    assert first["placement"] == "index CPU, rows CPU, attention CPU"
    assert "why" not in second


def test_a_history_that_is_attended_to_anyway_is_no_measurement() -> None:
    settings = retrievers.Settings(("quest",), (300,), (1,), 16, "auto", **TINY)
    (row,) = retrievers.measure(settings, Counting(), {})
    assert row["why"] == "quest: 300 tokens are all attended to: too few to retrieve from"
    assert row["us"] is None


def test_what_cannot_be_bound_is_refused_before_anything_is_measured() -> None:
    measured: dict[str, Any] = {}
    settings = retrievers.Settings(("window", "uva"), (2500,), (1,), 16, "auto", **TINY)
    with pytest.raises(BindingError, match="no retriever implements coarse_select"):
        next(retrievers.measure(settings, Counting(), measured))
    assert measured == {}


def test_codes_in_host_memory_are_asked_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, device = retrievers.Settings((), (), (), 16, "auto"), torch.device("meta")
    info, asked = settings.info(0, 1, device), {}  # type: LayerInfo, dict[str, int]
    monkeypatch.setattr(room, "refuse", lambda need, device, what: asked.update({device.type: need}))
    for name, is_hosted in (("quest", False), ("magicpig", True)):
        pipeline, window = settings.pipeline(name, 1 << 16, CPU)
        assert retrievers.are_codes_hosted(info, pipeline) == is_hosted
        room.refuse_layers(info, pipeline, window, 1 << 16, 2, in_host=False, codes_in_host=is_hosted)
        codes = 2 * room.estimate_layer(info, pipeline, window, 1 << 16, window.update).codes
        assert asked["cpu"] == codes * is_hosted
        assert asked["meta"] > 0


def test_kernel_rows_name_each_kernel_and_count_what_it_moves() -> None:
    settings = kernels.Settings((300,), (8, 32), ("resident",), "auto", copy_size=1000, **TINY)
    timer, measured = Counting(), {}  # type: Counting, dict[str, Any]
    rows = list(kernels.measure(settings, timer, measured))
    assert len(rows) == settings.num_rows
    assert [row["kernel"] for row in rows] == [
        "to frame", "encode", "query to frame", "linear table", "collide", "select votes", "rerank",
        "rotate query (paper)", "tier table (paper)", "collide (paper)", "rerank (paper)",
        "select scores 8", "attend 8", "select scores 32", "attend 32", "fetch resident 8", "fetch resident 32",
    ]  # fmt: skip
    for row in rows:
        assert tuple(row) == FIELDS["kernels"]
        assert row["us"] == 10.0
        assert row["bandwidth_fraction"] == pytest.approx(row["bytes"] / 2000)
    moved = {row["kernel"]: row["bytes"] for row in rows}
    heads, dim = 2, 64
    assert moved["encode"] == heads * (300 * (4 * dim + 8 + 32 + 16) + 8 * 256 * 4)
    assert moved["to frame"] == heads * (300 * (4 * dim + 4 * dim + 1) + 4 * dim * dim)
    assert moved["collide"] == heads * (300 * (8 + 1 + 1) + 8 * 256 + 4 * 256)
    assert moved["collide (paper)"] == heads * (300 * (8 + 1) + 8 * 256)
    assert moved["rerank"] == moved["rerank (paper)"] == heads * 75 * (32 + 16 + 4 + 4)
    assert moved["attend 32"] == heads * ((kernels.STEADY + 32) * 2 * dim * 4 + 2 * 2 * dim * 4)
    assert moved["fetch resident 32"] == 2 * heads * 32 * 2 * dim * 4
    assert set(measured) == {"copy_bytes_per_s", "bus_bytes_per_s"}


def test_kernels_that_do_not_fit_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*others: Any) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(kernels, "make_inputs", too_large)
    settings = kernels.Settings((300,), (8,), (), "auto", copy_size=1000, **TINY)
    rows = list(kernels.measure(settings, Counting(), {}))
    assert [row["why"] for row in rows] == ["CUDA out of memory."] * settings.num_rows


def test_fetched_rows_are_named_after_their_store_and_reuse() -> None:
    settings = kernels.Settings((300,), (8,), (), "auto")
    names = [fetch.fetch_name(settings, store, 2048) for store in synthetic.STORES]
    assert names == ["fetch resident 2048", "fetch uva 2048", "fetch uva 2048 reuse 70%"]


def test_a_fetch_of_more_rows_than_there_are_says_why() -> None:
    settings = kernels.Settings((300,), (200,), ("resident",), "auto", **TINY)
    row = fetch.fetch_row(settings, Counting(), 300, 200, "resident", {})
    assert row["why"] == "300 tokens are too few to choose 200 others at every step"
    assert row["us"] is None


@pytest.mark.parametrize("prefill", [False, True])
def test_decode_rows_hold_both_sides(prefill: bool) -> None:
    settings = decode.Settings(
        "tiny", TINY_MODEL, (2300,), (1, 2), ("resident",), 16, "auto",
        graph=False, compile=False, steps=3, prefill=prefill, dtype=torch.float32, copy_size=1000,
    )  # fmt: skip
    measured: dict[str, Any] = {}
    rows = list(decode.measure(settings, Counting(), measured))
    assert len(rows) == settings.num_rows
    for row, batch in zip(rows, (1, 2), strict=True):
        assert tuple(row) == FIELDS["decode"]
        assert (row["shape"], row["tokens"], row["batch"], row["store"]) == ("tiny", 2300, batch, "resident")
        assert row["tokens_per_s"] == pytest.approx(1e3 * batch / row["ms"])
        assert row["dense_tokens_per_s"] == pytest.approx(1e3 * batch / row["dense_ms"])
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["dense_tokens_per_s"])
        assert row["host_bytes"] > 0
        assert [row["ttft_s"] is None, row["dense_ttft_s"] is None] == [not prefill] * 2
    assert [one["batch"] for one in measured["dense"]] == [1, 2]
    read = [{"tokens": 2300, "batch": batch, "store": "resident", "history": "buffer"} for batch in (1, 2)]
    assert measured.get("prefill_history", []) == (read if prefill else [])


def test_a_side_that_does_not_fit_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*others: Any) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less")

    monkeypatch.setattr(decode, "dense_step", too_large)
    settings = decode.Settings(
        "tiny", TINY_MODEL, (300,), (1,), ("resident",), 16, "auto", graph=False, compile=False, steps=2,
        dtype=torch.float32, copy_size=1000,
    )  # fmt: skip
    (row,) = decode.measure(settings, Counting(), {})
    assert row["why"] == "dense: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert (row["dense_ms"], row["ratio"]) == (None, None)
    assert row["ms"] > 0


def test_the_time_of_a_step_is_the_mean_after_the_warm_up() -> None:
    ticks = iter([10.0, 14.0])
    calls: list[int] = []
    assert decode.seconds_per_step(lambda: calls.append(0), 8, lambda: next(ticks)) == 0.5
    assert len(calls) == decode.WARM_UP + 8


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_are_those_of_the_published_models(shape: str) -> None:
    sizes = SHAPES[shape]
    hidden, layers, mlp = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["intermediate_size"]
    heads = 2 * (sizes["num_attention_heads"] + sizes["num_key_value_heads"]) * sizes["head_dim"]
    embeddings = sizes["vocab_size"] * hidden * (1 if sizes.get("tie_word_embeddings") else 2)
    billions = (embeddings + layers * hidden * (heads + 3 * mlp)) / 1e9
    published = {"llama3-8b": 8.03, "llama3.2-1b": 1.24, "smollm2-135m": 0.1345, "qwen3-8b": 8.19, "qwen3-4b": 4.02}
    assert billions == pytest.approx(published[shape], rel=4e-3)


def batches(**changes: Any) -> batching.Settings:
    settings = {
        "shape": "tiny", "sizes": TINY_MODEL, "requests": 4, "shortest": 30, "longest": 90, "batches": (2, 4),
        "stores": ("resident",), "new_tokens": 8, "top_k": 16, "candidates": "auto", "graph": False,
    }  # fmt: skip
    return batching.Settings(**{**settings, **changes})


def test_batches_are_measured_beside_one_request_after_the_other() -> None:
    settings = batches()
    assert sorted(settings.lengths) == [30, 50, 70, 90]
    rows = list(batching.measure(settings, CPU))
    assert [row["batch"] for row in rows] == [2, 4]
    for row in rows:
        assert tuple(row) == FIELDS["batching"], row.get("why")
        assert (row["requests"], row["prompt_tokens"], row["new_tokens"]) == (4, 240, 8)
        assert row["tokens_per_s"] == pytest.approx(32 / row["seconds"])
        assert 0 < row["read_seconds"] < row["seconds"]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["alone_tokens_per_s"])
        assert row["step_ratio"] == pytest.approx(row["batch"] * row["alone_step_ms"] / row["step_ms"])


def test_a_step_takes_what_the_long_run_takes_longer_than_the_short_one_without_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seconds of a run, and of reading in it: two runs one after the other, then two of a batch.
    runs = iter([(100.0, 60.0), (158.0, 70.0), (70.0, 60.0), (72.0, 50.0)])
    monkeypatch.setattr(batching._Case, "_seconds", lambda *arguments: next(runs))
    (row,) = batching.measure(batches(batches=(4,), new_tokens=12), CPU)
    assert row["alone_step_ms"] == pytest.approx(1e3 * (88 - 40) / (4 * 6))
    assert row["step_ms"] == pytest.approx(1e3 * (22 - 10) / 6)
    assert row["step_ratio"] == pytest.approx(4.0)
    assert row["ratio"] == pytest.approx(158 / 72)
    assert (row["read_seconds"], row["alone_read_seconds"]) == (50.0, 70.0)


def test_a_batch_without_room_says_why_and_leaves_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(cache: object, rows: int, *others: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("pariskv.integrations.transformers.ParisCache.open_rows", too_large)
    (row,) = batching.measure(batches(batches=(2,)), CPU)
    assert row["why"].startswith("resident, batch 2: request ")
    assert (row["seconds"], row["ratio"]) == (None, None)
    assert row["alone_seconds"] > 0


class NoDriver:
    """What the allocator asks of a driver, for a machine without one; a second goes by with every look at the clock."""

    same_addresses = True

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self.held[address]

    def device_address(self, address: int) -> int:
        return address

    def synchronize(self) -> None: ...


def test_memory_rows_hold_both_ways_and_give_everything_back() -> None:
    driver = NoDriver()
    small, large = memory.measure(memory.Settings((1 << 22, 1 << 60)), CPU, driver, driver.clock)
    assert tuple(small)[:4] == FIELDS["memory"]
    assert small["fallback_gb_per_s"] == pytest.approx((1 << 22) / 1e9)
    assert small["seconds"] == 1.0 or "the fast way is not possible here" in small["why"]  # by the machine's settings
    assert driver.held == {}
    assert large["seconds"] is large["fallback_gb_per_s"] is None
    assert "are free" in large["why"]


# Pictures


def test_pictures_are_by_batch_and_by_shape() -> None:
    longer = {**LAYER_ROW, "tokens": 1 << 20, "us": 190.0, "dense_us": 1000.0}
    missing = {**LAYER_ROW, "tokens": 1 << 19, "us": None}
    (one,) = latency([result("layer", longer, LAYER_ROW, missing), result("decode", DECODE_ROW)])
    assert one[0] == "layer-batch1-top100"
    assert one[3]["uva"] == [(131072, 70.04), (1 << 20, 190.0)]
    assert len(one[3]["dense SDPA"]) == 3
    (two,) = throughput([result("decode", DECODE_ROW)])
    assert two[0] == "decode-llama3-8b-128K"
    assert two[3] == {"dense": [(6, 300.0)], "uva": [(6, 600.0)]}


def test_plot_writes_a_file_for_each_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for kind, row in (("layer", LAYER_ROW), ("decode", DECODE_ROW)):
        write_json(tmp_path / f"{kind}.json", result(kind, row))
    assert pariskv("plot", tmp_path / "layer.json", tmp_path / "decode.json", "--out", tmp_path / "new") == 0
    names = ["layer-batch1-top100.svg", "decode-llama3-8b-128K.svg"]
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == names
    assert all("<svg" in (tmp_path / "new" / name).read_text() for name in names)
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot([], tmp_path)


# The commands


@pytest.mark.parametrize(
    "command",
    [
        ["kernels"],
        ["layer"],
        ["decode", "--shape", "llama3-8b"],
        ["retrievers"],
        ["memory"],
        ["batching", "--shape", "llama3-8b", "--device", "cuda"],
    ],
)
def test_without_a_gpu_a_benchmark_refuses_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pariskv(*command, "--json", tmp_path / "out.json") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: benchmarks need a CUDA device")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--tokens", "32X"], "--tokens: got '32X', wanted a number of tokens"),
        (["layer", "--batch", "0"], "--batch: got '0', wanted an integer from 1 on"),
        (["layer", "--store", "disk"], "--store: got 'disk', wanted one of resident, uva, uva reuse"),
        (["layer", "--overlap", "1"], "--overlap: got 1.0, wanted a share between 0 and 1"),
        (["layer", "--candidates", "7.5"], "candidates: got 7.5"),
        (["decode"], "Missing option '--shape'"),
        (
            ["decode", "--shape", "gpt2"],
            "--shape: got 'gpt2', wanted one of llama3-8b, llama3.2-1b, smollm2-135m, qwen3-4b, qwen3-8b",
        ),
        (["decode", "--shape", "llama3-8b", "--memory-cap", "lots"], "--memory-cap: got 'lots', wanted a size"),
        (["decode", "--shape", "llama3-8b", "--tokens", "100"], "--steps: got 256, wanted fewer than the 100 tokens"),
        (["retrievers", "--retrievers", "pariskv,magic"], "--retrievers: got 'magic', wanted one of dense, evict"),
        (["batching", "--shape", "smollm2-135m", "--device", "tpu"], "--device: got 'tpu', wanted auto, cuda or cpu"),
        (["batching", "--shape", "smollm2-135m", "--batch", "1"], "--batch: got 1, wanted at least 2"),
        (["batching", "--shape", "smollm2-135m", "--shortest", "5000"], "--shortest: got 5000, wanted 1 to the 4000"),
        (["memory", "--bytes", "many"], "--bytes: got 'many', wanted a size"),
        (["markdown", "none.json"], "none.json: cannot be read as JSON"),
        (["plot", "none.json"], "none.json: cannot be read as JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "plot":
        pytest.importorskip("matplotlib")
    assert pariskv(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_markdown_prints_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_json(tmp_path / f"{name}.json", result("layer", LAYER_ROW))
    assert pariskv("markdown", tmp_path / "one.json", tmp_path / "two.json") == 0
    assert capsys.readouterr().out.count("| 128K | 1 | 100 | uva |") == 2


SMALL = ["--tokens", "8K", "--top-k", "64"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what transformers imports with a model
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("command", "count"),
    [
        (["kernels", *SMALL, "--replays", "3"], 11 + 2 + 3),
        (["layer", *SMALL, "--batch", "1,2", "--replays", "3"], 6),
        (["decode", "--shape", "llama3.2-1b", *SMALL, "--steps", "8", "--no-compile"], 1),
        (["decode", "--shape", "llama3.2-1b", *SMALL, "--steps", "8", "--no-compile", "--no-graph", "--prefill"], 1),
        (["retrievers", *SMALL, "--batch", "1,2", "--steps", "3"], 16),
        (["memory", "--bytes", "64MiB,256MiB"], 2),
        (["batching", "--shape", "llama3.2-1b", "--requests", "4", "--batch", "2,4", "--new-tokens", "16"], 2),
    ],
)
def test_a_command_measures_every_row_on_the_device(command: list[str], count: int, tmp_path: Path) -> None:
    assert pariskv(*command, "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["manifest"]["hardware"]["gpu"]
    assert len(found["rows"]) == count
    optional = {"hit_rate", "ttft_s", "dense_ttft_s"}
    for row in found["rows"]:
        assert tuple(row) == FIELDS[command[0]], row.get("why")
        assert [name for name, value in row.items() if value is None and name not in optional] == []
