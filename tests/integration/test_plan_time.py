"""The planner's times: at least what must be read takes, and never more than what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from pariskv.bench.output import read_json
from pariskv.cli import main
from pariskv.config import parse_config
from pariskv.integrations.activations import meta_model
from pariskv.integrations.described import described, prompt_weights, step_weights
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model
from pariskv.integrations.shapes import SHAPES, described_shape
from pariskv.plan import Described, for_machine
from pariskv.plan_time import (
    Rates,
    answers_seconds,
    dense_answers_seconds,
    dense_bytes,
    prompt_flops,
    prompt_seconds,
    step_bytes,
    step_time,
)
from pariskv.registry import Registry
from pariskv.units import parse_bytes, parse_flops, parse_rate

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "configs" / "smollm2.yaml"
CUDA = torch.device("cuda")
WINDOW = {"sink": 16, "local": 64, "update_interval": 64, "dense_below": 300}
# Of the tiny llama, three layers of 2 heads of 16: 69,504 parameters without the input embedding.
WEIGHTS = 4 * (3 * (48 * 96 + 2 * 48 * 32 + 96 * 48 + 3 * 48 * 64 + 2 * 48) + 48 + 97 * 48)
MATRICES = 3 * (48 * 96 + 2 * 48 * 32 + 96 * 48 + 3 * 48 * 64)
ROW = 2 * 2 * 16 * 4


def plan_of(retriever: str = "pariskv", device: torch.device = CUDA, family: str = "llama", **more: Any) -> Described:
    layer = {"retriever": retriever, "top_k": 64, "candidates": 100}
    if retriever in ("dense", "exact", "quest", "snapkv", "magicpig", "window"):
        del layer["candidates"]
    config = parse_config({"layers": {"default": layer}, "window": WINDOW, **more})
    model = tiny_model(family, torch.float32)
    return described(meta_model(model.config, model.dtype, type(model)), for_machine(config, device), device)


def test_the_bytes_of_a_step_are_those_counted_by_hand() -> None:
    # 1000 tokens: 896 in the zone, 104 in sink and ring. A key has 2 bytes of signs, one of its norm,
    # and as a candidate 8 bytes of codes and 2 weights of 2 bytes.
    layer = 896 * 2 * (2 + 1) + 100 * 2 * (8 + 4) + 104 * ROW
    found = step_bytes(plan_of(), 990, 1000, 1)
    assert (found.device, found.bus) == (WEIGHTS + 3 * layer, 3 * 64 * ROW)
    batch = step_bytes(plan_of(), 990, 1000, 5)
    assert (batch.device, batch.bus) == (WEIGHTS + 5 * 3 * layer, 5 * 3 * 64 * ROW)
    assert dense_bytes(plan_of(), 1000, 5) == WEIGHTS + 5 * 3 * 1000 * ROW


@pytest.mark.parametrize(("store", "device"), [("resident", CUDA), ("auto", torch.device("cpu"))])
def test_a_store_beside_the_model_uses_no_bus(store: str, device: torch.device) -> None:
    found, offloaded = (
        step_bytes(plan_of(store=store, device=device), 990, 1000, 1),
        step_bytes(plan_of(), 990, 1000, 1),
    )
    assert (found.device, found.bus) == (offloaded.device + offloaded.bus, 0)


def test_below_dense_below_everything_is_read_from_the_window() -> None:
    assert step_bytes(plan_of(), 199, 200, 2).device == dense_bytes(plan_of(), 200, 2)
    assert step_bytes(plan_of("dense"), 999, 1000, 2).device == dense_bytes(plan_of(), 1000, 2)


def test_the_slower_of_memory_and_bus_is_the_time() -> None:
    plan = plan_of()
    read = step_bytes(plan, 960, 1000, 2)
    memory = step_time(plan, Rates(10**6, 10**9), 1000, 2)
    assert memory.step_ms == pytest.approx(read.device / 1e3)
    assert memory.tokens_per_s == pytest.approx(2 / (read.device / 1e6))
    assert memory.dense.step_ms == pytest.approx(dense_bytes(plan, 1000, 2) / 1e3)
    assert step_time(plan, Rates(10**9, 10**3), 1000, 2).step_ms == pytest.approx(read.bus)
    assert step_time(plan, Rates(10**6), 1000, 2).step_ms == memory.step_ms


@pytest.mark.parametrize("retriever", ["pariskv", "pariskv-paper", "quest", "exact", "dense"])
def test_longer_wider_and_slower_take_no_less(retriever: str) -> None:
    plan = plan_of(retriever)
    times = [step_time(plan, Rates(10**9, 10**8), tokens, 1).step_ms for tokens in range(400, 9000, 171)]
    read = [step_bytes(plan, tokens, tokens, 1).device for tokens in range(336, 9000, 64)]  # as much in the ring
    assert read == sorted(read)
    assert min(times) > 0
    one, two = (step_time(plan, Rates(10**9, 10**8), 4000, batch) for batch in (1, 2))
    assert one.step_ms <= two.step_ms <= 2 * one.step_ms
    for slower in (Rates(10**8, 10**8), Rates(10**9, 10**7), Rates(10**3, 10**3)):
        later = step_time(plan, slower, 4000, 1)
        assert later.step_ms >= one.step_ms
        assert later.dense.step_ms >= one.dense.step_ms


REGISTRY = Registry.load(entry_points=False)
SELECTING = [name for name in REGISTRY.names() if hasattr(REGISTRY.make(name, {}), "coarse_select")]


@pytest.mark.parametrize("retriever", [*SELECTING, "dense"])
def test_every_retriever_has_a_time(retriever: str) -> None:
    assert step_time(plan_of(retriever), Rates(10**9), 2000, 1).step_ms >= WEIGHTS / 1e6


def test_the_number_of_rows_is_only_counted_where_it_is_promised() -> None:
    assert step_bytes(plan_of(retrievers={"pariskv": {"min_share": 0.001}}), 990, 1000, 1).bus == 0
    assert step_bytes(plan_of("shadowkv"), 990, 1000, 1).bus == 0


@pytest.mark.parametrize("prompt", [1, 250, 990])
@pytest.mark.parametrize("retriever", ["pariskv", "pariskv-paper", "snapkv", "dense"])
def test_answers_read_the_sum_of_their_steps(retriever: str, prompt: int) -> None:
    plan = plan_of(retriever)
    steps = [step_bytes(plan, prompt, tokens, 3) for tokens in range(prompt + 1, prompt + 411)]
    device, bus = (sum(parts) for parts in zip(*((one.device, one.bus) for one in steps), strict=True))
    assert answers_seconds(plan, Rates(10**9), prompt, 410, 3) == pytest.approx(device / 1e9)
    assert answers_seconds(plan, Rates(10**9, 10**3), prompt, 410, 3) == pytest.approx(max(device / 1e9, bus / 1e3))


def test_a_tied_embedding_is_read_and_another_is_not() -> None:
    own, tied = (
        meta_model(tiny_model("llama", torch.float32, tie_word_embeddings=is_tied).config, torch.float32)
        for is_tied in (False, True)
    )
    assert step_weights(own) == step_weights(tied) == WEIGHTS
    assert sum(weight.nbytes for weight in own.parameters()) == WEIGHTS + 4 * 97 * 48


def test_of_experts_only_those_that_a_token_takes_count() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = meta_model(tiny_model("gpt_oss", torch.float32, **sizes).config, torch.float32)
    experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    everything = sum(weight.nbytes for weight in model.parameters())
    assert experts > 0
    assert step_weights(model) == everything - 4 * 97 * 48 - experts // 2
    of_layer = 3 * 48 * 64 * 4  # numbers in the matrices of a layer's four experts
    dense = sum(one.numel() for name, one in model.named_parameters() if one.dim() == 2 and ".experts." not in name)
    layers = model.config.num_hidden_layers
    assert prompt_weights(model) == dense - 2 * 97 * 48 + layers * of_layer // 2


def test_the_operations_of_a_prompt_are_those_counted_by_hand() -> None:
    pairs = 2 * (1 + 2 + 3)  # of a query with itself or an earlier token, in two rows
    assert prompt_flops(plan_of(), 3, 2) == 2 * MATRICES * 6 + 3 * 6 * pairs * (2 * 16 + 2 * 16)
    assert prompt_seconds(plan_of(), Rates(1, flops=1000), 3, 2) == prompt_flops(plan_of(), 3, 2) / 1000
    assert prompt_seconds(plan_of(), Rates(1), 3, 2) == 0


def test_answers_take_the_time_of_their_prompts_too() -> None:
    plan, rates, faster = plan_of(), Rates(10**9), Rates(10**9, flops=10**6)
    prompts = prompt_seconds(plan, faster, 990, 3)
    assert prompts > 0
    for of in (answers_seconds, dense_answers_seconds):
        assert of(plan, faster, 990, 10, 3) == pytest.approx(of(plan, rates, 990, 10, 3) + prompts)


needs_smollm2 = pytest.mark.skipif(
    local_path(resolve_model(DEFAULT_MODEL)) is None, reason=f"{DEFAULT_MODEL} is not on this machine"
)
MACHINE = ["--device-memory", "80GB", "--host-memory", "512GB"]
ARGUMENTS = ["plan", str(SMOLLM2), "layers.default.retriever=dense", "--context", "4K", *MACHINE]


def run(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, *more])
    assert ended.value.code == 0
    return capsys.readouterr().out


@needs_smollm2
def test_the_command_adds_times_and_changes_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    without = json.loads(run(capsys, "--json"))
    found = json.loads(run(capsys, "--json", "--bandwidth", "4.8TB/s", "--bus", "50 GB/s"))
    time = found.pop("time")
    for name, part in without.items():  # what is measured differs a little from plan to plan
        assert found[name] == (pytest.approx(part, rel=0.05) if isinstance(part, dict) else part)
    assert set(time) == {"step_ms", "tokens_per_s", "dense", "prompt_s"}
    assert set(time["dense"]) == {"step_ms", "tokens_per_s"}
    assert time["prompt_s"] is None
    kv = 30 * 4096 * 2 * 3 * 64 * 2
    assert time["step_ms"] == pytest.approx((2 * 134_515_008 + kv) / 4.8e9)
    assert time["dense"]["step_ms"] == time["step_ms"]
    out = run(capsys, "--bandwidth", "4.8TB/s", "--flops", "989 TFLOP/s")
    assert "a step takes at least" in out
    assert "reading the prompts takes at least" in out
    assert "a step takes" not in run(capsys)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bandwidth", "4.8TB"], r"--bandwidth: got '4\.8TB', wanted bytes per second such as 4\.8TB/s or 50GB/s"),
        (["--bandwidth", "fast"], r"--bandwidth: got 'fast', wanted bytes per second"),
        (["--bandwidth", "1TB/s", "--bus", "50Gb/m"], r"--bus: got '50Gb/m', wanted bytes per second"),
        (["--bus", "50GB/s"], r"--bus: got '50GB/s' without --bandwidth; give both"),
        (["--flops", "1PFLOPS"], r"--flops: got '1PFLOPS' without --bandwidth; give both"),
        (
            ["--bandwidth", "1TB/s", "--flops", "1T"],
            r"--flops: got '1T', wanted operations per second such as 989TFLOP/s",
        ),
    ],
)
def test_a_rate_that_means_nothing_is_one_line(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, *more])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("file", ["decode", "decode-128k-early", "decode-512k-early", "decode-1m", "decode-batch"])
def test_no_measured_step_was_faster(file: str) -> None:
    found = read_json(ROOT / "docs" / "benchmarks" / f"{file}.json")
    assert found.rows
    for row in found.rows:
        plan = described_shape(SHAPES[row["shape"]], parse_config(found.manifest["config"]), CUDA)
        least = step_time(plan, Rates(4_800 * 10**9, 64 * 10**9), row["tokens"], row["batch"])  # nominal: H200, PCIe 5
        assert least.step_ms < row["ms"]
        assert least.dense.step_ms < row["dense_ms"]


def test_no_measured_prompt_was_faster() -> None:
    found = read_json(ROOT / "docs" / "benchmarks" / "decode-prefill.json")
    measured = 0
    for row in found.rows:
        plan = described_shape(SHAPES[row["shape"]], parse_config(found.manifest["config"]), CUDA)
        least = prompt_seconds(
            plan, Rates(1, flops=989 * 10**12), row["tokens"], row["batch"]
        )  # nominal: H200, bfloat16
        for took in (row["ttft_s"], row["dense_ttft_s"]):
            assert least < took < 3 * least
            measured += 1
    assert measured == 4


def test_rates_and_sizes_are_taken_as_they_are_written() -> None:
    assert parse_rate("1.07TB/s") == 1_070_000_000_000
    assert parse_rate("64 GiB/s") == 64 << 30
    assert parse_flops("1.5PFLOPS") == parse_flops("1500 TFLOP/s") == 1_500_000_000_000_000
    assert parse_bytes("2.01GB") == 2_010_000_000  # as a float it is 2009999999.9999998


def test_dense_answers_take_the_sum_of_their_steps() -> None:
    plan, rates = plan_of(), Rates(10**9)
    steps = [dense_bytes(plan, tokens, 3) / 1e9 for tokens in range(991, 1401)]
    assert dense_answers_seconds(plan, rates, 990, 410, 3) == pytest.approx(sum(steps))
