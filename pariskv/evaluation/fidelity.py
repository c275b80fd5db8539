"""Fidelity along a text: each layer's retrieval against dense attention, and what it does to the next token.

A dense pass reads the text's beginning as the prompt and the tokens after it one by one, whatever the model would have
said (teacher-forced). Every layer's steps are then decoded again on the pass's own queries, keys and values
(`pariskv.replay`), so one layer's error is not in the next one's figures. For the logits the whole model decodes the
same tokens. Sums are kept, never a matrix of tokens by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pariskv.config import Config
from pariskv.decode import Batch, make_steps
from pariskv.errors import ConfigError
from pariskv.evaluation.charts import Chart
from pariskv.evaluation.results import Results, Table, number, percent
from pariskv.lengths import refuse_attended_prompt, refuse_beyond_context
from pariskv.metrics import LAYER_MEASURES, Fidelity, Mean, measure_logits
from pariskv.registry import Registry
from pariskv.replay import PassThrough, Tape, replay_layer
from pariskv.types import Tensors

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.reference import Reference
    from pariskv.integrations.transformers import ParisCache

SUMMARY = ("candidate_recall", "recall", "mass_ratio", "output_error", "kl", "argmax_agreement", "fetched")
"""What a summary says, in this order; None for what a retriever does not let be known."""

HEADS = (*LAYER_MEASURES, "fetched")
"""What is said of a layer."""

CHUNK = 2048
"""Tokens of a prompt that go through the dense pass at a time."""

PROMPT = "the prompt (--tokens)"

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, of how much."""


@dataclass
class Measured:
    """The means over texts, steps, layers and heads.

    logits  the means of the measures of the next token
    steps   KL by step
    texts   the summary of each text by itself
    """

    fidelity: Fidelity = field(default_factory=Fidelity)
    logits: dict[str, Mean] = field(default_factory=dict)
    steps: dict[int, Mean] = field(default_factory=dict)
    texts: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def add_logits(self, step: int, values: Tensors) -> None:
        """Take what `measure_logits` returned of a step, [B] each."""
        for name, value in values.items():
            self.logits.setdefault(name, Mean()).add(value.mean())
        self.steps.setdefault(step, Mean()).add(values["kl"].mean())

    def kl_by_step(self) -> list[float]:
        """The mean over the texts, step by step."""
        return [float(mean.value) for _, mean in sorted(self.steps.items())]

    def summary(self) -> dict[str, float | None]:
        """The `SUMMARY` over everything."""
        found = self.fidelity.summary() | {name: float(mean.value) for name, mean in self.logits.items()}
        return {name: found.get(name) for name in SUMMARY}

    def layers(self) -> list[dict[str, Any]]:
        """A row for each layer: its means, and those of its heads."""
        heads = self.fidelity.per_head()
        return [
            {"layer": index, **{name: means.get(name) for name in HEADS}, "heads": heads[index]}
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
        for one in into:
            one.add_logits(step, measure_logits(logits, reference.logits[step : step + 1]))
        progress(done := done + 1, total)


def results_of(found: Measured, manifest: Mapping[str, Any], title: str) -> Results:
    """The measures as tables, charts and JSON."""
    summary, words = found.summary(), [name.replace("_", " ") for name in SUMMARY]
    texts = [[name, *_shown(means, SUMMARY)] for name, means in found.texts.items()]
    layers = [[str(row["layer"]), *_shown(row, HEADS)] for row in found.layers()]
    headline = (
        f"What is fetched has {percent(summary['mass_ratio'])} of the attention that the best choice of as many rows "
        f"has. The next token is dense attention's in {percent(summary['argmax_agreement'])} of the steps."
    )
    return Results(
        manifest,
        {"layers": found.layers(), "summary": summary},
        title,
        headline,
        list(zip(_shown(summary, SUMMARY), words, strict=True)),
        [
            Table("By text", ["text", *words], [*texts, ["all", *_shown(summary, SUMMARY)]], summed=1),
            Table("By layer", ["layer", *(name.replace("_", " ") for name in HEADS)], layers),
        ],
        [
            Chart("Recall and mass ratio by layer", lambda figure: _draw_layers(figure, found)),
            Chart("KL to dense attention by step", lambda figure: _draw_steps(figure, found)),
        ],
        tuple(dict.fromkeys((*SUMMARY, *HEADS))),
    )


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The values as a table shows them: shares and errors to four digits, rows to one."""
    return [number(values[name], digits=1 if name == "fetched" else 4) for name in names]


def _draw_layers(figure: Any, found: Measured) -> None:
    plane = figure.subplots()
    for name in ("mass_ratio", "recall", "candidate_recall"):
        points = [(row["layer"], row[name]) for row in found.layers() if row[name] is not None]
        if points:
            plane.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name.replace("_", " "))
            plane.legend()
    plane.set(xlabel="layer", ylim=(0, 1.03))
    plane.grid()


def _draw_steps(figure: Any, found: Measured) -> None:
    plane = figure.subplots()
    plane.plot(range(1, len(found.steps) + 1), found.kl_by_step(), marker="o", markersize=4)
    plane.set(xlabel="step", ylabel="KL, nats")
    plane.set_ylim(bottom=0)
    plane.grid()
