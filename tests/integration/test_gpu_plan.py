"""On a CUDA device: the plan of a request is right within 5 % of the allocator's peak."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from pariskv.config import GenerationConfig, parse_config
from pariskv.decode import Batch, generate
from pariskv.integrations.activations import meta_model
from pariskv.integrations.described import described
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.shapes import SHAPES, random_model
from pariskv.plan import for_machine
from pariskv.planner import chunk_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW = 16


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return random_model(SHAPES["llama3.2-1b"], "llama3.2-1b", torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("retriever", "history", "batch", "tokens"),
    [
        ("pariskv", "buffer", 1, 16_000),
        ("pariskv", "buffer", 1, 65_536),
        ("pariskv", "store", 1, 65_536),
        ("pariskv-paper", "buffer", 4, 8000),
        ("quest", "buffer", 2, 32_768),
    ],
)
def test_the_plan_is_right_within_five_percent_of_the_allocators_peak(
    model: LanguageModel, retriever: str, history: Any, batch: int, tokens: int
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    layers = {"default": {"retriever": retriever, "top_k": 512}}
    config = for_machine(parse_config({"layers": layers, "prefill": {"history": history}}), device)
    meta = meta_model(model.model.config, torch.bfloat16, type(model.model))
    plan = described(meta, config, device)
    planned = plan.weights + plan.planner.estimate(batch, tokens, NEW, history).peak

    model.new_cache(config).warm_up()
    gc.collect()
    torch.cuda.empty_cache()
    outside = torch.cuda.memory_allocated(device) - plan.weights  # what other tests keep alive
    torch.cuda.reset_peak_memory_stats(device)
    ids = torch.randint(1, 1000, (batch, tokens), device=device)
    settings = GenerationConfig(max_new_tokens=NEW)
    for _ in generate(model, model.new_cache(config), Batch(ids), settings, chunk_for("auto", tokens)):
        pass
    taken = torch.cuda.max_memory_allocated(device) - outside
    assert planned == pytest.approx(taken, rel=0.05), f"planned {planned:,}, taken {taken:,}"
