"""What the planner says a step and a benchmark take at least, beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from markup import code, table

from pariskv.bench.output import read_json
from pariskv.config import Config, load_config, parse_config
from pariskv.evaluation.tasks.duration import answers_of
from pariskv.integrations.shapes import SHAPES, described_shape
from pariskv.plan_time import Rates, answers_seconds, dense_answers_seconds, step_time

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
H200 = 4_800 * 10**9
"""Bytes per second of its memory, as NVIDIA gives them."""
CUDA = torch.device("cuda")
MEASURED = ("decode", "decode-1m", "decode-batch")
MODELS = {
    "Qwen/Qwen3-8B": ("qwen3-8b", 40_960),
    "Qwen/Qwen3-4B-Thinking-2507": ("qwen3-4b", 262_144),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama3-8b", 131_072),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("llama3-8b", 131_072),
}
"""The sizes of the papers' models, as in `SHAPES`, and their contexts."""


def rates() -> Rates:
    """An H200's memory, and its bus as it was measured."""
    return Rates(H200, int(read_json(BENCHMARKS / "kernels.json").manifest["measured"]["bus_bytes_per_s"]))


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


def papers() -> str:
    """Every configuration of the paper's benchmarks."""
    head = ("Configuration", "Answers", "Tokens of each", "Batch", "`pariskv`", "`pariskv`, `store=resident`", "Dense")
    files = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
    return table(head, (_paper(file.stem, load_config(file, [])) for file in files))


def _paper(name: str, config: Config) -> tuple[object, ...]:
    shape, context = MODELS[config.model.name]
    batch = config.evaluation.batch
    answers = answers_of(config.evaluation, context)
    ours, resident = (
        described_shape(SHAPES[shape], replace(config, store=store), CUDA) for store in ("uva", "resident")
    )
    ways = [
        partial(answers_seconds, ours, rates()),
        partial(answers_seconds, resident, rates()),
        partial(dense_answers_seconds, ours, rates()),
    ]
    times = (duration(sum(one.seconds(way, batch) for one in answers)) for way in ways)
    lengths = sorted({one.new_tokens for one in answers})
    tokens = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return code(name), f"{sum(one.count for one in answers):,}", tokens, batch, *times


def duration(seconds: float) -> str:
    """Hours from two on, else minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
