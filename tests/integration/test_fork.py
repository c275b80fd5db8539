"""`ParisCache.fork()`: continuations of one prefix, each as a run of its own; what they share is held once."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_meter import Meter, unmetered_lower_right
from prefix_cases import config_of
from tiny_models import dense_generate, greedy, language_model, prompt, tiny_model

from pariskv import ParisCache, attention, parse_config
from pariskv.config import Config, GenerationConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.errors import BindingError, ModelError
from pariskv.integrations.language_model import LanguageModel
from pariskv.prefix import Prefix, load_prefix, save_prefix

WINDOW_OF_8 = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
ALL = parse_config({"layers": {"default": {"candidates": 1.0, "top_k": 400}}, "window": WINDOW_OF_8})
QUESTIONS = [prompt(count, seed=count) for count in (9, 1, 21)]


def read(model: LanguageModel, config: Config, tokens: int = 90, new: int = 40, rows: int = 1) -> Prefix:
    cache, batch = model.new_cache(config), Batch(prompt(tokens, batch=rows))
    return Prefix(cache, batch, prefill(model, cache, batch, new))


def answer(model: LanguageModel, prefix: Prefix, question: torch.Tensor, new: int = 40) -> list[list[int | None]]:
    prefix.append(model, question.expand(len(prefix.batch.tokens), -1), new)
    return list(prefix.generate(model, GenerationConfig(max_new_tokens=new)))


def generated(model: Any, ids: torch.Tensor, cache: ParisCache, new: int) -> torch.Tensor:
    out: torch.Tensor = greedy(model, ids, new, cache=cache).sequences
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize(
    "case", ["pariskv", "pariskv-paper", "host", "exact", "quest", "pqcache", "magicpig", "dense", "sliding"]
)
def test_forks_of_a_prefix_answer_as_prefixes_that_were_read_by_themselves(case: str) -> None:
    model = language_model(tiny_model("gemma3" if case == "sliding" else "llama", torch.float64))
    config = config_of(case)
    fresh = [answer(model, read(model, config), question) for question in QUESTIONS]
    prefix = read(model, config)
    forks = [prefix.fork(40) for _ in QUESTIONS[1:]]
    for fork, question, want in zip([prefix, *forks], QUESTIONS, fresh, strict=True):
        assert answer(model, fork, question) == want
    assert len({str(one) for one in fresh}) == len(QUESTIONS), "questions that are answered alike prove nothing"


def test_forks_take_turns_and_do_not_mix() -> None:
    model = language_model(tiny_model("llama", torch.float64))
    config, settings = config_of("pariskv"), GenerationConfig(max_new_tokens=50)

    def asked(prefix: Prefix, question: torch.Tensor) -> Any:
        prefix.append(model, question, 50)
        return prefix.generate(model, settings)

    alone = [list(asked(read(model, config), question)) for question in QUESTIONS]
    first = read(model, config)
    runs = [asked(one, question) for one, question in zip([first, first.fork(), first.fork()], QUESTIONS, strict=True)]
    together = list(zip(*runs, strict=True))
    assert [list(run) for run in zip(*together, strict=True)] == alone


def test_a_fork_in_the_middle_of_a_generation_goes_on_as_the_other_does() -> None:
    model = tiny_model("llama", torch.float64)
    lm, cache = language_model(model), ParisCache(model, ALL)
    logits = prefill(lm, cache, Batch(prompt(60)), 200)
    begun = list(decode(lm, cache, Batch(prompt(60)), logits, GenerationConfig(max_new_tokens=30)))
    fork = cache.fork()
    grandchild = fork.fork()
    ids = torch.cat((prompt(60), torch.tensor(begun).T), dim=1)
    want, _ = dense_generate(model, ids, 60)
    for one in (fork, cache, grandchild):
        assert torch.equal(generated(model, ids, one, 60), want)


def test_a_fork_goes_back_into_what_it_shares_and_the_others_stay() -> None:
    model = tiny_model("llama", torch.float64)
    lm, cache = language_model(model), ParisCache(model, ALL)
    prefill(lm, cache, Batch(prompt(160)), 20)
    back = cache.fork()
    back.crop(-100)
    for one, left in ((back, 60), (cache, 160)):
        ids = torch.cat((prompt(160)[:, :left], prompt(9, seed=5)), dim=1)
        want, _ = dense_generate(model, ids, 40)
        assert torch.equal(generated(model, ids, one, 40), want)


def test_rows_of_a_fork_change_places() -> None:
    model = tiny_model("llama", torch.float64)
    cache, ids = ParisCache(model, ALL), torch.cat([prompt(70, seed=seed) for seed in range(3)])
    prefill(language_model(model), cache, Batch(ids[:, :60]), 20)
    fork, order = cache.fork(), torch.tensor([2, 0, 0])
    with torch.no_grad():
        model(ids[:, 60:69], cache=fork)
        fork.reorder_cache(order)
        got = model(ids[:, 69:], cache=fork).logits
        whole = torch.cat((ids[order][:, :69], ids[:, 69:]), dim=1)
        want = model(whole, cache=ParisCache(model, ALL)).logits[:, -1:]
        first = model(ids[:, 60:], cache=cache).logits
        again = model(ids, cache=ParisCache(model, ALL)).logits[:, 60:]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(first, again)


def test_a_loaded_prefix_is_forked_too(tmp_path: Path) -> None:
    model = language_model(tiny_model("llama", torch.float64))
    config = config_of("pariskv")
    save_prefix(tmp_path / "p.safetensors", read(model, config), model)
    want = [answer(model, read(model, config), question) for question in QUESTIONS]
    loaded = load_prefix(tmp_path / "p.safetensors", model, config)
    forks = [loaded.fork(40) for _ in QUESTIONS]
    del loaded
    assert [answer(model, fork, question) for fork, question in zip(forks, QUESTIONS, strict=True)] == want


def test_forks_allocate_what_they_add_and_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that torch allocates: the prefix once, a tail and a ring for each fork."""
    monkeypatch.setattr(attention, "causal_lower_right", unmetered_lower_right)
    model = language_model(tiny_model("llama"))
    config = parse_config({"layers": {"default": {"top_k": 8}}, "window": WINDOW_OF_8})
    prefix = read(model, config, tokens=6000, new=1)
    base = prefix.cache.request.kv_host_bytes
    with Meter() as meter:
        forks = [prefix.fork(20) for _ in range(4)]
        assert host_bytes([prefix, *forks]) == base
        begun = meter.live
        assert begun < base / 8  # rings, and what formats have learnt
        for fork in forks:
            answer(model, fork, QUESTIONS[0], 20)
        tails = host_bytes([prefix, *forks]) - base
        assert 0 < tails < base / 10
        codes = sum(fork.cache.request.code_bytes for fork in forks)
        assert meter.live == pytest.approx(begun + tails + codes, rel=0.1)
        del fork, forks
        gc.collect()
        assert meter.live < 10_000


def host_bytes(prefixes: list[Prefix]) -> int:
    return sum(prefix.cache.request.kv_host_bytes for prefix in prefixes)


@pytest.mark.parametrize("case", ["evict", "shadowkv"])
def test_what_cannot_be_shared_is_refused_and_the_cache_stays_as_it_was(case: str) -> None:
    model = language_model(tiny_model("llama", torch.float64))
    config, settings = config_of(case), GenerationConfig(max_new_tokens=40)
    want = list(read(model, config).generate(model, settings))
    prefix = read(model, config)
    with pytest.raises(BindingError, match=r"layer 0: the store of retriever '.*' \(.*\) cannot be forked"):
        prefix.fork()
    assert list(prefix.generate(model, settings)) == want


def test_an_empty_cache_is_not_forked() -> None:
    with pytest.raises(ModelError, match="fork: the cache holds nothing yet"):
        ParisCache(tiny_model("llama"), ALL).fork()
