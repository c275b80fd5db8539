"""What the planner says a step and a benchmark take, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from markup import code, table

from pariskv.bench.output import read_json
from pariskv.config import Config, load_config, parse_config
from pariskv.evaluation.tasks.duration import answers_of
from pariskv.integrations.shapes import SHAPES, described_shape
from pariskv.plan import Described, dense
from pariskv.plan_time import Rates, answers_seconds, dense_answers_seconds, prompt_seconds, step_time

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
H200, H200_FLOPS = 4_800 * 10**9, 989 * 10**12
"""Bytes per second of its memory, and operations of its matrices in bfloat16, as NVIDIA gives them."""
GPU = 80 * 10**9
"""Bytes of the device that memory is planned for."""
CUDA = torch.device("cuda")
MEASURED = ("decode", "decode-1m", "decode-batch")
MODELS = {
    "Qwen/Qwen3-8B": ("qwen3-8b", 40_960),
    "Qwen/Qwen3-4B-Thinking-2507": ("qwen3-4b", 262_144),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama3-8b", 131_072),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("llama3-8b", 131_072),
}
"""The sizes of the papers' models, as in `SHAPES`, and their contexts."""
SHORT = 1024
"""Tokens of a prompt that memory is planned for where prompts are short beside their answers."""


@dataclass(frozen=True)
class Paper:
    """A configuration of the paper's benchmarks, and the sizes of its model."""

    name: str
    config: Config
    shape: str
    context: int

    def described(self, store: str = "uva", new_tokens: int | None = None) -> Described:
        """Its model; of all that have one shape activations are measured once."""
        new = self.config.generation.max_new_tokens if new_tokens is None else new_tokens
        config = replace(self.config, store=store, generation=replace(self.config.generation, max_new_tokens=new))
        found = described_shape(SHAPES[self.shape], config, CUDA)
        return replace(found, planner=replace(found.planner, known=known(self.shape)))


@cache
def known(shape: str) -> dict[object, object]:
    """What was measured of a shape."""
    return {}


def papers() -> Iterator[Paper]:
    """Every configuration of the paper's benchmarks."""
    for file in sorted((ROOT / "configs" / "paper").glob("*.yaml")):
        config = load_config(file, [])
        yield Paper(file.stem, config, *MODELS[config.model.name])


def rates() -> Rates:
    """An H200's memory and matrices, and its bus as it was measured."""
    bus = read_json(BENCHMARKS / "kernels.json").manifest["measured"]["bus_bytes_per_s"]
    return Rates(H200, int(bus), H200_FLOPS)


def steps() -> str:
    """Measured steps of `docs/benchmarks`, and how many times the least they took."""
    rows = []
    for name in MEASURED:
        found = read_json(BENCHMARKS / f"{name}.json")
        config = parse_config(found.manifest["config"])
        for row in found.rows:
            least = step_time(described_shape(SHAPES[row["shape"]], config, CUDA), rates(), row["tokens"], row["batch"])
            pairs = ((least.step_ms, row["ms"]), (least.dense.step_ms, row["dense_ms"]))
            cells = [f"{one:.1f} ms, {took:.1f} ms, {took / one:.1f}" for one, took in pairs]
            rows.append((row["shape"], f"{row['batch']} x {row['tokens']:,}", *cells, found.manifest["date"][:10]))
    names = [f"{name}: at least, measured, factor" for name in ("`pariskv`", "dense")]
    return table(("Model", "Tokens", *names, "Measured on"), rows)


def prompts() -> str:
    """Measured prompts of `docs/benchmarks`, and how many times the least they took."""
    found = read_json(BENCHMARKS / "decode-prefill.json")
    config = parse_config(found.manifest["config"])
    rows = []
    for row in found.rows:
        model = described_shape(SHAPES[row["shape"]], config, CUDA)
        least = prompt_seconds(model, rates(), row["tokens"], row["batch"])
        cells = [
            "-" if took is None else f"{least:.2f} s, {took:.2f} s, {took / least:.1f}"
            for took in (row["ttft_s"], row["dense_ttft_s"])
        ]
        rows.append((row["shape"], f"{row['batch']} x {row['tokens']:,}", *cells, found.manifest["date"][:10]))
    names = [f"{name}: at least, measured, factor" for name in ("`pariskv`", "dense")]
    return table(("Model", "Tokens", *names, "Measured on"), rows)


def memory() -> str:
    """What the longest request of each configuration of the paper takes."""
    head = ("Configuration", "Rows x tokens", "New ones", "Device", "Host", "Device, dense attention")
    return table(head, (_memory(paper) for paper in papers()))


def _memory(paper: Paper) -> tuple[object, ...]:
    batch = paper.config.evaluation.batch
    answers = answers_of(paper.config.evaluation, paper.context, SHORT)
    longest = max(answers, key=lambda one: (one.prompt + one.new_tokens, one.new_tokens))
    prompt, new, tokens = longest.prompt, longest.new_tokens, longest.prompt + longest.new_tokens
    model = paper.described(new_tokens=new)
    need = model.planner.estimate(batch, prompt, new, model.planner.history_in(GPU - model.weights, batch, prompt, new))
    sizes = (model.weights + need.peak, need.held.hosted, dense(model, tokens, batch)["total"])
    return code(paper.name), f"{batch} x {tokens:,}", f"{new:,}", *(f"{size / 1e9:.1f} GB" for size in sizes)


def times() -> str:
    """What the answers of each configuration of the paper take at least."""
    head = (
        "Configuration",
        "Requests",
        "Tokens of each answer",
        "Batch",
        "`pariskv`",
        "`pariskv`, `store=resident`",
        "Dense",
    )
    return table(head, (_times(paper) for paper in papers()))


def _times(paper: Paper) -> tuple[object, ...]:
    batch = paper.config.evaluation.batch
    answers = answers_of(paper.config.evaluation, paper.context)
    ours, resident = (paper.described(store) for store in ("uva", "resident"))
    ways = [
        partial(answers_seconds, ours, rates()),
        partial(answers_seconds, resident, rates()),
        partial(dense_answers_seconds, ours, rates()),
    ]
    found = (duration(sum(one.seconds(way, batch) for one in answers)) for way in ways)
    lengths = sorted({one.new_tokens for one in answers})
    tokens = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return code(paper.name), f"{sum(one.count for one in answers):,}", tokens, batch, *found


def duration(seconds: float) -> str:
    """Hours from two on, else minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
