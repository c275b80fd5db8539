"""The traced forward of a step: one graph for every step and every request, and the tokens of the plain forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import language_model, prompt, tiny_model

from pariskv import ParisCache, parse_config
from pariskv.config import GenerationConfig
from pariskv.decode import Batch, EagerSteps, prefill
from pariskv.integrations.compiled import CompiledForward
from pariskv.sampling import Sampler

WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
LOSSY = parse_config({"layers": {"default": {"top_k": 16, "candidates": 0.5}}, "window": WINDOW})


def started(model: Any, ids: torch.Tensor) -> tuple[Any, ParisCache, torch.Tensor]:
    lm, cache = language_model(model), ParisCache(model, LOSSY)
    return lm, cache, prefill(lm, cache, Batch(ids), 40)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_one_graph_serves_every_step_and_every_request(family: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(family)
    forward = CompiledForward(model, backend="eager")
    sampler = Sampler(GenerationConfig(), 1)
    for tokens in (150, 40):
        ids = prompt(tokens)
        lm, cache, logits = started(model, ids)
        plain = EagerSteps(lm, cache, Batch(ids), sampler)
        _, traced_cache, traced_logits = started(model, ids)
        assert torch.equal(logits, traced_logits)
        token = sampler(logits)
        positions = torch.full((1, 1), tokens)
        with torch.no_grad():
            for _ in range(20):
                traced = sampler(forward(token.unsqueeze(1), positions, traced_cache))
                traced_cache.end_step()
                token = plain.step(token.unsqueeze(1))
                assert torch.equal(traced, token)
                positions = positions + 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_that_somebody_else_compiles_attends_densely() -> None:
    torch._dynamo.reset()
    model, ids = tiny_model("llama"), prompt(20)
    ParisCache(model, LOSSY)
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        got = torch.compile(model.forward, backend="eager")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, want)
