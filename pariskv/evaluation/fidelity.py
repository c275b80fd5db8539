"""Fidelity along a text: each layer's retrieval against dense attention, and what it does to the next token.

A dense pass reads the text's beginning as the prompt and the tokens after it one by one, whatever the model would have
said (teacher-forced). Every layer's steps are then decoded again on the pass's own queries, keys and values
(`pariskv.replay`), so one layer's error is not in the next one's figures. For the logits the whole model decodes the
same tokens. Sums are kept, never a matrix of tokens by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pariskv.config import Config
from pariskv.decode import Batch, make_steps
from pariskv.errors import ConfigError
from pariskv.lengths import refuse_attended_prompt, refuse_beyond_context
from pariskv.metrics import LAYER_MEASURES, Fidelity, Mean, measure_logits
from pariskv.registry import Registry
from pariskv.replay import PassThrough, Tape, replay_layer

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.reference import Reference
    from pariskv.integrations.transformers import ParisCache

SUMMARY = ("candidate_recall", "recall", "mass_ratio", "output_error", "kl", "argmax_agreement")
"""What a summary says, in this order; None for what a retriever does not let be known."""

CHUNK = 2048
"""Tokens of a prompt that go through the dense pass at a time."""

PROMPT = "the prompt (--tokens)"

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, of how much."""


@dataclass
class Measured:
    """The means over texts, steps, layers and heads.

    texts  the summary of each text by itself
    """

    fidelity: Fidelity = field(default_factory=Fidelity)
    logits: dict[str, Mean] = field(default_factory=dict)
    texts: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def summary(self) -> dict[str, float | None]:
        """The `SUMMARY` over everything."""
        found = self.fidelity.summary() | {name: float(mean.value) for name, mean in self.logits.items()}
        return {name: found.get(name) for name in SUMMARY}

    def layers(self) -> list[dict[str, Any]]:
        """A row for each layer: its means, and those of its heads."""
        heads = self.fidelity.per_head()
        return [
            {"layer": index, **{name: means.get(name) for name in LAYER_MEASURES}, "heads": heads[index]}
            for index, means in self.fidelity.per_layer().items()
        ]


def measure_fidelity(
    model: LanguageModel,
    config: Config,
    samples: Mapping[str, str],
    tokens: int,
    steps: int,
    registry: Registry | None = None,
    progress: Progress = lambda *_: None,
) -> Measured:
    """Measure a configuration along the samples, texts by name: `tokens` tokens as the prompt, then `steps`.

    Raises ConfigError for a text that is too short, or of which nothing would be retrieved, CapacityError beyond the
    model's context.
    """
    from pariskv.integrations.reference import read_densely
    from pariskv.integrations.transformers import ParisCache

    whole = Measured()
    rows = {name: _tokens_of(model, name, text, tokens + steps) for name, text in samples.items()}
    refuse_length(model, config, tokens, steps)
    keep_queries = wants_queries(ParisCache(model.model, config, registry))
    for name, row in rows.items():
        own = Measured()
        prompt, then, said = row[:, :tokens], row[:, tokens:], partial(progress, f"{name}, dense")
        reference = read_densely(model, prompt, then, 0, CHUNK, keep_queries, said)
        _replay(model, config, reference, registry, (own, whole), partial(progress, name))
        whole.texts[name] = own.summary()
    return whole


def _tokens_of(model: LanguageModel, name: str, text: str, wanted: int) -> torch.Tensor:
    row = model.encode([text]).tokens
    if row.shape[1] < wanted:
        raise ConfigError(
            f"text {name!r} has {row.shape[1]} tokens, wanted {wanted} (--tokens and --steps together); "
            f"give a longer text, or lower --tokens"
        )
    return row[:, :wanted]


def refuse_length(model: LanguageModel, config: Config, tokens: int, steps: int) -> None:
    """Refuse prompts of which nothing would be retrieved, and those that the model has no positions for."""
    refuse_attended_prompt(config, tokens, PROMPT)
    refuse_beyond_context(config, model.context_length, tokens, steps, PROMPT)


def wants_queries(cache: ParisCache) -> bool:
    """Whether a format of the cache learns from the prompt's queries."""
    return any(pipeline.wants_queries for pipeline in cache.request.pipelines.values())


@torch.no_grad()
def _replay(
    model: LanguageModel,
    config: Config,
    reference: Reference,
    registry: Registry | None,
    into: tuple[Measured, ...],
    progress: Callable[[int, int], None],
) -> None:
    """Measure the layers one by one, then the model's logits; the prompt is encoded once for both."""
    from pariskv.integrations.transformers import ParisCache

    cache, watched = (ParisCache(model.model, config, registry) for _ in range(2))
    cache.warm_up()
    tape = Tape()
    tape.record(cache.request)
    for _ in reference.fill(cache):
        pass
    tape.is_recording = False
    tape.play(watched.request)
    total, done = len(reference.layers) + reference.steps, 0
    for index, trace in reference.layers.items():
        info, top_k = watched.geometry.expected_info(index, 1), max(1, watched.request.pipelines[index].top_k)
        for step, values in replay_layer(trace, watched.request, info, top_k):
            for one in into:
                one.fidelity.add(index, step, values)
        progress(done := done + 1, total)
    run = make_steps(model, cache, Batch(reference.prompt), PassThrough(), config.runtime, reference.prompt.device)
    for step in range(reference.steps):
        logits = run.step(reference.tokens[:, step : step + 1])
        for name, value in measure_logits(logits, reference.logits[step : step + 1]).items():
            for one in into:
                one.logits.setdefault(name, Mean()).add(value.mean())
        progress(done := done + 1, total)
