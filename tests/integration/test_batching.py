"""Continuous batching: what a request gets in a batch whose rows come and go is what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pariskv_plugins.resident import ResidentStore
from prefix_cases import CASES, config_of
from tiny_models import language_model, prompt, tiny_model

from pariskv.config import Config
from pariskv.errors import PluginContractError
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.transformers import ParisCache
from pariskv.serving.batching import Answer, Ask, Batching

MORE = {name: {"layers": {"default": {"retriever": name, "top_k": 16}}} for name in ("retroinfer", "window")}
FAMILIES = {"sliding": "gemma3", "sinks": "gpt_oss", "soft-cap": "gemma2", "norms": "qwen3"}


def asks_of(lengths: Sequence[int], new: Sequence[int]) -> list[Ask]:
    sizes = zip(lengths, new, strict=True)
    return [Ask(prompt(length, seed=seed)[0].tolist(), more) for seed, (length, more) in enumerate(sizes)]


def ragged(count: int, longest: int = 120, seed: int = 0) -> list[Ask]:
    draw = random.Random(seed)
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    return asks_of(lengths, [draw.randint(1, 40) for _ in lengths])


def batching(model: LanguageModel, config: Config, rows: int) -> Batching:
    return Batching(model, lambda: model.new_cache(config), rows, config.generation, config.runtime)


def answered(model: LanguageModel, config: Config, rows: int, asks: Sequence[Ask | None]) -> dict[int, Answer]:
    found = list(batching(model, config, rows).answers(asks))
    assert len({answer.index for answer in found}) == len(found), "an answer came twice"
    return {answer.index: answer for answer in found}


def a_model(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
    return language_model(tiny_model(family, dtype, **changes))


@pytest.mark.parametrize("case", [*(name for name in CASES if name not in ("ragged", "sliding")), *MORE, *FAMILIES])
def test_a_batch_gives_every_request_what_it_gets_alone(case: str) -> None:
    model, config = a_model(FAMILIES.get(case, "llama")), config_of(case, MORE.get(case))
    asks = asks_of([1, 90, 37, 61, 9], [20, 3, 24, 9, 1])
    together, alone = answered(model, config, 2, asks), answered(model, config, 1, asks)
    assert together == alone
    assert [len(alone[index].tokens) for index in range(5)] == [ask.max_new_tokens for ask in asks]
    assert len({tuple(answer.tokens) for answer in alone.values()}) == 5, "requests that answer alike prove nothing"


def caches_made(model: LanguageModel, config: Config, asks: Sequence[Ask]) -> int:
    """How many caches it takes to answer the requests, two at a time."""
    made: list[ParisCache] = []

    def new_cache() -> ParisCache:
        made.append(model.new_cache(config))
        return made[-1]

    answers = list(Batching(model, new_cache, 2, config.generation, config.runtime).answers(asks))
    assert not any(answer.error for answer in answers)
    return len(made)


def test_prompts_are_read_into_one_cache_that_is_emptied_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = a_model(), config_of("pariskv")
    assert caches_made(model, config, asks_of([90, 1, 120, 40], [4, 3, 5, 2])) == 2  # one is the batch's

    def refuse(store: object, row: int, tokens: int) -> None:
        raise PluginContractError("cannot forget")

    monkeypatch.setattr(ResidentStore, "crop", refuse)
    assert caches_made(model, config, asks_of([90, 120], [4, 4])) == 3
