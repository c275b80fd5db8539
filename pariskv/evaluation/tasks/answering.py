"""Prompts of a batch, answered by one retriever from a fresh cache: the one place where the model is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pariskv.config import Config
from pariskv.decode import Batch, decode, generate, make_steps, prefill
from pariskv.evaluation.tasks.item import Item
from pariskv.planner import chunk_for
from pariskv.replay import PassThrough

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel


@dataclass(frozen=True)
class Prompt:
    """Token ids of an item, and where its question begins in them; the seed of what is sampled."""

    tokens: list[int]
    question: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """A generated text, its number of tokens, and whether it ended by itself."""

    text: str
    tokens: int
    ended: bool


def encode(model: LanguageModel, item: Item, chat: str, seed: int = 0) -> Prompt:
    """The item through the chat template, and the beginning of its answer behind that."""
    if not model.uses_template(chat):
        tokens = _ids(model, item.prompt, "off")
    else:
        prefix = model.plain_ids(item.answer_prefix.lstrip()) if item.answer_prefix else []
        tokens = _ids(model, item.context + item.question, chat) + prefix
    context = _ids(model, item.context, chat) if item.context else []
    same = (one == other for one, other in zip(tokens, context, strict=False))
    shared = next((index for index, is_same in enumerate(same) if not is_same), min(len(tokens), len(context)))
    return Prompt(tokens, max(1, min(shared, len(tokens) - 1)), seed)


def count_tokens(model: LanguageModel, item: Item, chat: str) -> int:
    """Tokens that `encode` makes of an item."""
    if not model.uses_template(chat):
        return model.count_tokens(item.prompt)
    prefix = model.plain_ids(item.answer_prefix.lstrip()) if item.answer_prefix else []
    return len(_ids(model, item.context + item.question, chat)) + len(prefix)


def _ids(model: LanguageModel, text: str, chat: str) -> list[int]:
    return [int(token) for token in model.encode([text], chat).tokens[0].tolist()]


def answer(
    model: LanguageModel, config: Config, prompts: Sequence[Prompt], max_new_tokens: int, is_sparse: bool = False
) -> list[Answer]:
    """The answers to a batch of prompts, padded on the left, from a cache of their own.

    is_sparse  the question is decoded, not read with the context: then one prompt after the other
    Raises CapacityError where the batch does not fit into memory.
    """
    settings = replace(config, generation=replace(config.generation, max_new_tokens=max_new_tokens))
    if not is_sparse:
        return _collect(model, len(prompts), _read_densely(model, settings, prompts))
    return [one for prompt in prompts for one in _collect(model, 1, _read_sparsely(model, settings, prompt))]


def _read_densely(model: LanguageModel, config: Config, prompts: Sequence[Prompt]) -> Iterator[list[int | None]]:
    batch = replace(model.batch_of([one.tokens for one in prompts]), seeds=[one.seed for one in prompts])
    rows, columns = batch.tokens.shape
    cache = model.new_cache(config)
    if config.runtime.check_memory:
        cache.planner.refuse(rows, columns, config.generation.max_new_tokens)
    cache.warm_up()
    chunk = chunk_for(config.prefill.chunk, columns)
    yield from generate(model, cache, batch, config.generation, chunk, runtime=config.runtime)


@torch.no_grad()
def _read_sparsely(model: LanguageModel, config: Config, prompt: Prompt) -> Iterator[list[int | None]]:
    """The context is read at once; the question goes through decode steps, as tokens that were generated do."""
    context, question = prompt.tokens[: prompt.question], prompt.tokens[prompt.question :]
    new_tokens = len(question) + config.generation.max_new_tokens
    cache = model.new_cache(config)
    if config.runtime.check_memory:
        cache.planner.refuse(1, len(context), new_tokens)
    cache.warm_up()
    batch = model.batch_of([context])
    prefill(model, cache, batch, new_tokens, chunk_for(config.prefill.chunk, len(context)))
    run = make_steps(model, cache, batch, PassThrough(), config.runtime, batch.tokens.device)
    logits = torch.empty(0)
    for token in question:
        logits = run.step(batch.tokens.new_tensor([[token]]))
    whole = Batch(model.batch_of([prompt.tokens]).tokens, seeds=[prompt.seed])
    yield from decode(model, cache, whole, logits.clone(), config.generation, config.runtime)


def _collect(model: LanguageModel, rows: int, steps: Iterator[list[int | None]]) -> list[Answer]:
    found: list[list[int]] = [[] for _ in range(rows)]
    for step in steps:
        for tokens, token in zip(found, step, strict=True):
            if token is not None:
                tokens.append(token)
    return [Answer(model.decode(one), len(one), one[-1] in model.eos_ids) for one in found]
