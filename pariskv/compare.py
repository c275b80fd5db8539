"""`pariskv compare`: retrievers side by side on one prompt, at one budget, against one dense pass.

The model reads the prompt once, densely. Every retriever is then given that pass's keys and values, twice:

    fidelity  its stages answer the dense pass's own queries, layer by layer, without the model: `pariskv.replay`
    decoding  the model decodes with it, fed the dense continuation; nothing watches, so this is what is timed

The budget is distinct rows fetched per key/value head and step. What the columns are: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pariskv.config import DEFAULT, Config
from pariskv.decode import Batch, make_steps
from pariskv.errors import ConfigError
from pariskv.lengths import refuse_attended_prompt, refuse_beyond_context
from pariskv.metrics import Fidelity, Mean, host_bytes_per_step, index_bytes_per_token, measure_logits
from pariskv.planner import chunk_for
from pariskv.registry import Registry
from pariskv.replay import Clock, PassThrough, Tape, filled_layer, fitting_top_k, replay_layer
from pariskv.resolve import Instance, Retrievers
from pariskv.units import parse_count, parse_list

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.reference import Reference
    from pariskv.integrations.transformers import ParisCache

ORACLE = "exact"
"""The retriever that is run as the oracle, by the name alone."""

DENSE = "dense"
ORACLE_COMBINE = "sum_softmax"

PLOTTED_BUDGETS = (32, 64, 128, 256)
"""What `--plot` draws where no `--top-k` says otherwise."""

UNTIMED_STEPS = 2
"""Steps in which something is compiled, captured or touched for the first time."""

PROBED_LAYERS = 4
"""Layers that are tried to find the top_k of methods whose query heads choose apart."""

PROTOCOLS = ("dense", "sparse")

Progress = Callable[[str, int, int], None]
"""Called with (what is done, how much of it, how much there is)."""


@dataclass(frozen=True)
class Row:
    """One retriever at one budget; None where something cannot be known.

    index_bytes_per_token  codes, and what a store in host memory keeps on the device, per key/value head
    host_bytes_per_step    keys and values that are brought from host memory, all layers
    prefill_seconds        what the retriever adds to a prefill: encode, fit, update, the dense part's rows
    combine                how the query heads of a group choose together
    protocol               whether the question was read densely with the prompt, or decoded
    """

    retriever: str
    attended_tokens_per_step: float | None
    candidate_recall: float | None
    recall: float | None
    mass_ratio: float | None
    output_error: float | None
    kl: float
    argmax_agreement: float
    index_bytes_per_token: float
    host_bytes_per_step: float
    prefill_seconds: float
    ms_per_step: float
    combine: str
    protocol: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


FIELDS = tuple(item.name for item in fields(Row))


@dataclass(frozen=True)
class Settings:
    """What to compare: every retriever at every budget.

    steps     tokens of the dense continuation that are decoded and measured
    protocol  dense: the question is read with the rest of the prompt; sparse: it is decoded, token by token
    """

    retrievers: tuple[str, ...]
    budgets: tuple[int, ...]
    steps: int = 32
    protocol: str = "dense"

    def __post_init__(self) -> None:
        twice = next((name for name in self.retrievers if self.retrievers.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"--retrievers: {twice!r} is listed twice; list it once")
        if self.steps < 1:
            raise ConfigError(f"--steps: got {self.steps}, wanted an integer from 1 on")
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"--question: got {self.protocol!r}, wanted one of {', '.join(PROTOCOLS)}")


def parse_settings(
    retrievers: str, budgets: str | None, steps: int, protocol: str, config: Config, plotted: bool = False
) -> Settings:
    """The settings as the command line has them; without budgets those of the plot, or the configuration's own."""
    own = PLOTTED_BUDGETS if plotted else (config.layers[DEFAULT].top_k or 0,)
    found = parse_list(budgets, parse_count, "--top-k") if budgets else own
    if min(found) < 1:
        raise ConfigError("--top-k: the configuration has layers.default.top_k=0, wanted at least 1; give --top-k")
    return Settings(parse_list(retrievers, str, "--retrievers"), found, steps, protocol)


def config_for(config: Config, retriever: str, top_k: int) -> Config:
    """The configuration with one retriever in every layer, but for the ranges that it keeps dense."""
    default = replace(
        config.layers[DEFAULT],
        retriever=retriever,
        top_k=top_k,
        **dict.fromkeys(("encode", "coarse_select", "rerank", "fetch", "update", "codes_from")),
    )
    kept = {key: layer for key, layer in config.layers.items() if key != DEFAULT and layer.retriever == DENSE}
    retrievers = config.retrievers
    if retriever == ORACLE:
        retrievers = {**retrievers, ORACLE: {"combine": ORACLE_COMBINE}}
    return replace(config, layers={DEFAULT: default, **kept}, retrievers=retrievers)


def check_names(config: Config, names: Sequence[str], registry: Registry) -> None:
    """Raise ConfigError, or what is wrong with a plugin, for a name that no retriever and no instance has."""
    for name in names:
        if name not in registry.retrievers and name not in config.retrievers:
            raise registry.unknown(name, "--retrievers", also=config.retrievers)


def combine_of(one: Instance) -> str:
    """How the query heads of a group choose together, as a retriever says by `combine`: its own or an option."""
    if one.traits.indexes == "none":
        return "none"
    options = getattr(one.retriever, "options", None)
    declared = getattr(one.retriever, "combine", None) or getattr(options, "combine", None)
    if isinstance(declared, str):
        return declared
    return "per_query_head" if one.traits.selects_per_query_head else "undeclared"


class Comparison:
    """Retrievers of a configuration on one prompt.

    Raises ConfigError for names, prompts and budgets that cannot be, CapacityError for what does not fit.
    """

    def __init__(self, model: LanguageModel, config: Config, settings: Settings, registry: Registry | None = None):
        self.model, self.config, self.settings = model, config, settings
        self.registry = registry or Registry.load()
        check_names(config, settings.retrievers, self.registry)

    def rows(self, text: str, chat: str = "off", progress: Progress = lambda *_: None) -> Iterator[tuple[int, Row]]:
        """(budget, row), all retrievers of a budget in their order, one budget after the other."""
        prompt, question = self._tokens(text, chat)
        tokens = prompt.shape[1] + question.shape[1]
        refuse_attended_prompt(self.config, prompt.shape[1])
        refuse_beyond_context(self.config, self.model.context_length, tokens, self.settings.steps)
        keep = True in [self._needs_queries(name, tokens) for name in self.settings.retrievers]
        reference = self._read(prompt, question, keep, progress)
        for budget in self.settings.budgets:
            for name in self.settings.retrievers:
                yield budget, _Contender(self, reference, name, budget, progress).row()

    def new_cache(self, name: str, top_k: int, **options: object) -> ParisCache:
        """A cache in which one retriever, with these options, serves every layer; `exact` is made the oracle."""
        from pariskv.integrations.transformers import ParisCache

        config = config_for(self.config, name, top_k)
        own = {**config.retrievers.get(name, {}), **options}
        config = replace(config, retrievers={**config.retrievers, **({name: own} if own else {})})
        cache = ParisCache(self.model.model, config, self.registry)
        cache.warm_up()
        return cache

    def instance(self, name: str) -> Instance:
        config = config_for(self.config, name, 1)
        return Retrievers(config, self.registry).get(name, "--retrievers")

    def _tokens(self, text: str, chat: str) -> tuple[Tensor, Tensor]:
        """The prompt and the question that is decoded after it, [1, n] and [1, Q]; under `dense` there is none."""
        whole = self.model.encode([text], chat).tokens
        if self.settings.protocol == "dense":
            return whole, whole[:, :0]
        context, _, question = text.rstrip().rpartition("\n")
        if not context.strip() or not question:
            raise ConfigError(
                "--question sparse: the question is the prompt's last line, and this prompt has one line only; "
                "put the question on a line of its own, or use --question dense"
            )
        start = _common_prefix(whole[0], self.model.encode([context], chat).tokens[0])
        return whole[:, :start], whole[:, start:]

    def _needs_queries(self, name: str, tokens: int) -> bool:
        """Whether a format wants the prompt's queries; refuses what cannot be bound or does not fit."""
        cache = self.new_cache(name, max(self.settings.budgets))
        if self.config.runtime.check_memory:
            cache.planner.refuse(1, tokens, self.settings.steps)
        return any(pipeline.wants_queries for pipeline in cache.request.pipelines.values())

    def _read(self, prompt: Tensor, question: Tensor, keep_queries: bool, progress: Progress) -> Reference:
        from pariskv.integrations.reference import read_densely

        chunk = chunk_for(self.config.prefill.chunk, prompt.shape[1]) or prompt.shape[1]
        progress("dense pass", 0, prompt.shape[1])
        return read_densely(
            self.model,
            prompt,
            question,
            self.settings.steps,
            chunk,
            keep_queries,
            lambda done, total: progress("dense pass", done, total),
        )


def _common_prefix(one: Tensor, other: Tensor) -> int:
    """How many tokens two texts [n] and [m] begin with alike."""
    shared = min(len(one), len(other))
    differ = (one[:shared] != other[:shared]).nonzero()
    return int(differ[0]) if len(differ) else shared


class _Contender:
    """One retriever at one budget."""

    def __init__(self, comparison: Comparison, reference: Reference, name: str, budget: int, progress: Progress):
        self.comparison, self.reference, self.name, self.budget = comparison, reference, name, budget
        self.first = reference.steps - comparison.settings.steps  # the question's steps are not measured
        self.done, self.total = 0, 2 * len(reference.layers) + 1 + reference.steps
        self.progress = progress

    def row(self) -> Row:
        top_k, tape = self._top_k(), Tape()
        cache = self.comparison.new_cache(self.name, top_k)
        tape.record(cache.request)
        prefill_seconds = self._fill(cache)
        tape.is_recording = False
        watched, is_same = self._watched(top_k)
        if is_same:
            tape.play(watched.request)
        fidelity = self._fidelity(watched)
        logits, ms_per_step = self._decode(cache)
        found = fidelity.summary()
        return Row(
            self.name,
            attended_tokens_per_step=found.get("attended"),
            candidate_recall=found.get("candidate_recall"),
            recall=found.get("recall"),
            mass_ratio=found.get("mass_ratio"),
            output_error=found.get("output_error"),
            kl=float(logits["kl"].value),
            argmax_agreement=float(logits["argmax_agreement"].value),
            index_bytes_per_token=index_bytes_per_token(list(cache.request.layers.values())),
            host_bytes_per_step=host_bytes_per_step(cache.request.layers, fidelity) if is_same else 0.0,
            prefill_seconds=prefill_seconds,
            ms_per_step=ms_per_step,
            combine=combine_of(self.comparison.instance(self.name)),
            protocol=self.comparison.settings.protocol,
        )

    def _top_k(self) -> int:
        """The budget, or the top_k at which query heads that choose apart fetch that many rows together."""
        cache = self.comparison.new_cache(self.name, self.budget)
        apart = [index for index, pipeline in cache.request.pipelines.items() if pipeline.per_query_head]
        if not apart:
            return self.budget
        layers = []
        for index in apart[:: max(1, len(apart) // PROBED_LAYERS)][:PROBED_LAYERS]:
            trace = self.reference.layers[index]
            layers.append((filled_layer(trace, cache.request, cache.geometry.expected_info(index, 1)), trace))
            cache.request.layers.clear()
        return fitting_top_k(layers, self.budget)

    def _watched(self, top_k: int) -> tuple[ParisCache, bool]:
        """A cache whose selections can be seen, and whether it fetches what the one that decodes fetches.

        A method that attends on the CPU to what it chooses, and fetches nothing, is watched where its option
        `placement: device` has it choose the same and fetch it; its choice knows no budget.
        """
        options = getattr(self.comparison.instance(self.name).retriever, "options", None)
        if getattr(options, "placement", None) == "cpu":
            group = next(iter(self.reference.layers.values())).heads.shape[3]
            room = -(-self.reference.prompt_tokens // group)  # G times as many slots hold any choice
            try:
                return self.comparison.new_cache(self.name, room, placement="device"), False
            except ConfigError:
                pass  # other options do not go with it: what cannot be seen stays unknown
        return self.comparison.new_cache(self.name, top_k), True

    def _fidelity(self, cache: ParisCache) -> Fidelity:
        fidelity = Fidelity()
        for index, trace in self.reference.layers.items():
            info = cache.geometry.expected_info(index, 1)
            for step, values in replay_layer(trace, cache.request, info, self.budget, self.first):
                fidelity.add(index, step - self.first, values)
            self._advance()
        return fidelity

    def _fill(self, cache: ParisCache) -> float:
        seconds = 0.0
        for part in self.reference.fill(cache):
            seconds += part
            self._advance()
        return seconds

    @torch.no_grad()
    def _decode(self, cache: ParisCache) -> tuple[dict[str, Mean], float]:
        """The measures of the logits, and milliseconds a step."""
        reference, device = self.reference, self.reference.prompt.device
        runtime = self.comparison.config.runtime
        run = make_steps(self.comparison.model, cache, Batch(reference.prompt), PassThrough(), runtime, device)
        clock = Clock(device)
        means = {name: Mean() for name in ("kl", "argmax_agreement")}
        for step in range(reference.steps):
            tokens = reference.tokens[:, step : step + 1]
            with clock.running():
                logits = run.step(tokens)
            if step >= self.first:
                for name, value in measure_logits(logits, reference.logits[step : step + 1]).items():
                    means[name].add(value.mean())
            self._advance()
        timed = clock.seconds[max(self.first, min(UNTIMED_STEPS, reference.steps - 1)) :]
        return means, 1e3 * sum(timed) / len(timed)

    def _advance(self) -> None:
        self.done += 1
        self.progress(f"{self.name}, top {self.budget}", self.done, self.total)
