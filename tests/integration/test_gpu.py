"""On a CUDA device: the same tokens as dense attention there, and a step that never asks the host."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from tiny_models import dense_generate, language_model, prompt, tiny_model

from pariskv import ParisCache, parse_config
from pariskv.config import GenerationConfig, RuntimeConfig
from pariskv.decode import Batch, decode, make_steps, prefill
from pariskv.graph import CapturedSteps
from pariskv.prefix import Prefix
from pariskv.sampling import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
COVERING = parse_config({"layers": {"default": {"top_k": 4000, "candidates": 1.0}}, "window": WINDOW})
LOSSY = parse_config({"layers": {"default": {"top_k": 16, "candidates": 0.5}}, "window": WINDOW})


def loop(
    model: Any,
    ids: torch.Tensor,
    config: Any,
    new: int,
    mask: torch.Tensor | None = None,
    graph: Literal["auto", "on", "off"] = "auto",
    temperature: float = 0.0,
) -> torch.Tensor:
    lm, batch, cache = language_model(model), Batch(ids, mask), ParisCache(model, config)
    logits = prefill(lm, cache, batch, new)
    settings = GenerationConfig(max_new_tokens=new, temperature=temperature, top_p=0.9)
    return torch.tensor(list(decode(lm, cache, batch, logits, settings, RuntimeConfig(graph)))).T


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_covering_budgets_equal_dense_on_the_device(family: str) -> None:
    model = tiny_model(family).cuda()
    ids = prompt(150).cuda()
    want, _ = dense_generate(model, ids, 44)
    assert torch.equal(loop(model, ids, COVERING, 44), want.cpu())


def test_a_ragged_batch_equals_single_rows_on_the_device() -> None:
    model = tiny_model("llama").cuda()
    ids = prompt(60, batch=2).cuda()
    mask = torch.arange(60, device="cuda") >= torch.tensor([[0], [23]], device="cuda")
    together = loop(model, ids, LOSSY, 40, mask)
    assert torch.equal(together[1:], loop(model, ids[1:, 23:], LOSSY, 40))


def test_the_device_chooses_what_the_cpu_chooses() -> None:
    model = tiny_model("llama")
    on_cpu = loop(model, prompt(150), LOSSY, 44)
    assert torch.equal(loop(model.cuda(), prompt(150).cuda(), LOSSY, 44), on_cpu)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_has_no_host_synchronisation() -> None:
    model = tiny_model("llama", torch.float32).cuda()
    lm, ids = language_model(model), prompt(150).cuda()
    cache = ParisCache(model, LOSSY)
    prefill(lm, cache, Batch(ids), 20)
    token, positions = ids[:, -1:], torch.full((1, 1), 150, device="cuda")
    with torch.no_grad():
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step fills caches of constants
            try:
                lm.forward(token, positions + step, None, cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            cache.end_step()


def replayed(
    model: Any, ids: torch.Tensor, config: Any, new: int, mask: torch.Tensor | None = None, temperature: float = 0.0
) -> tuple[Any, int]:
    """The tokens of captured steps, and how often a step was captured."""
    lm, batch, cache = language_model(model), Batch(ids, mask), ParisCache(model, config)
    logits = prefill(lm, cache, batch, new)
    sampler = Sampler(GenerationConfig(max_new_tokens=new, temperature=temperature, top_p=0.9), ids.shape[0])
    steps = make_steps(lm, cache, batch, sampler, RuntimeConfig(graph="on"), logits.device)
    assert isinstance(steps, CapturedSteps)
    tokens = [sampler(logits)]
    with torch.no_grad():
        while len(tokens) < new:
            tokens.append(steps.step(tokens[-1].unsqueeze(1)).clone())
    return torch.stack(tokens, dim=1).cpu(), steps.captures


def test_a_captured_step_draws_what_an_eager_one_draws() -> None:
    model, ids = tiny_model("llama", torch.float64).cuda(), prompt(60, batch=2).cuda()
    tokens, captures = replayed(model, ids, LOSSY, 60, temperature=1.5)
    assert captures
    assert torch.equal(tokens, loop(model, ids, LOSSY, 60, graph="off", temperature=1.5))
    assert not torch.equal(tokens, loop(model, ids, LOSSY, 60, graph="off"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
def test_a_compiled_step_gives_what_an_eager_one_gives() -> None:
    model, ids = tiny_model("llama", torch.float32).cuda(), prompt(150).cuda()
    lm, cache, batch = language_model(model), ParisCache(model, LOSSY), Batch(ids)
    logits = prefill(lm, cache, batch, 40)
    runtime = RuntimeConfig(graph="on", compile=True)
    tokens = torch.tensor(list(decode(lm, cache, batch, logits, GenerationConfig(max_new_tokens=40), runtime))).T
    assert torch.equal(tokens, loop(model, ids, LOSSY, 40, graph="off"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replayed_steps_equal_eager_ones_across_updates_and_growth(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype).cuda()
    ids = prompt(150).cuda()
    for config in (COVERING, LOSSY):
        tokens, captures = replayed(model, ids, config, 300)
        assert torch.equal(tokens, loop(model, ids, config, 300, graph="off"))
        assert captures >= 1


def test_replayed_ragged_rows_equal_eager_ones() -> None:
    model = tiny_model("llama").cuda()
    ids = prompt(60, batch=2).cuda()
    mask = torch.arange(60, device="cuda") >= torch.tensor([[0], [58]], device="cuda")
    tokens, _ = replayed(model, ids, LOSSY, 100, mask)
    assert torch.equal(tokens, loop(model, ids, LOSSY, 100, mask, graph="off"))


def test_two_thousand_replayed_steps_equal_eager_ones() -> None:
    model = tiny_model("llama").cuda()
    ids = prompt(30).cuda()
    tokens, captures = replayed(model, ids, LOSSY, 2000)
    assert torch.equal(tokens, loop(model, ids, LOSSY, 2000, graph="off"))
    assert captures < 20


@pytest.mark.parametrize("store", ["uva", "resident"])
def test_captured_steps_of_forks_equal_those_of_fresh_runs(store: str) -> None:
    """Through tails that begin and grow, and after going back into what is shared."""
    model = tiny_model("llama").cuda()
    config = parse_config({"store": store, "layers": {"default": {"top_k": 16, "candidates": 0.5}}, "window": WINDOW})
    lm, settings, ids = language_model(model), GenerationConfig(max_new_tokens=60), prompt(150).cuda()
    questions = [prompt(count, seed=count).cuda() for count in (9, 1, 21)]

    def answer(prefix: Prefix, question: torch.Tensor) -> list[list[int | None]]:
        prefix.append(lm, question, 60)
        return list(prefix.generate(lm, settings, RuntimeConfig(graph="on")))

    def read() -> Prefix:
        cache = ParisCache(model, config)
        return Prefix(cache, Batch(ids), prefill(lm, cache, Batch(ids), 60))

    want = [answer(read(), question) for question in questions]
    first = read()
    forks = [first, first.fork(), first.fork()]
    assert [answer(fork, question) for fork, question in zip(forks, questions, strict=True)] == want
    covering = ParisCache(model, COVERING)
    prefill(lm, covering, Batch(ids), 60)
    back = covering.fork()
    back.crop(-70)
    whole = torch.cat((ids[:, :80], questions[0]), dim=1)
    dense, _ = dense_generate(model, whole, 60)
    assert answer(Prefix(back, Batch(ids[:, :80])), questions[0]) == dense.T.tolist()
