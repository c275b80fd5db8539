"""Names in the YAML to a `LayerPipeline` of plain functions, once per layer; nothing here runs per token.

`pariskv.resolve` says which retriever gives which stage; here its method becomes a function that the
decode loop calls by position, and that says where it happened when it raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pluggy
from torch import Tensor

from pariskv.budget import CandidateRule
from pariskv.config import DEFAULT, Config, layer_range
from pariskv.errors import BindingError, ConfigError, PluginContractError
from pariskv.hookspecs import PROJECT, Need, StageSpec, hookimpl
from pariskv.registry import Registry
from pariskv.resolve import Indexes, Instance, Plan, Resolver, Retrievers
from pariskv.stages import FORMAT_STAGES, STAGES, Stage, wrapped_stages
from pariskv.tracing import REASON, Trace
from pariskv.types import (
    Budget,
    Codes,
    LayerInfo,
    Prefill,
    Query,
    Selected,
    Selection,
    Store,
    Tensors,
    WorkingSet,
)

AllocateCodes = Callable[[LayerInfo, int], Codes]
Fit = Callable[[LayerInfo, Prefill], Tensors]
IsStale = Callable[[Tensor, Tensors, list[int], list[int]], list[bool]]
Encode = Callable[[Tensor, Tensor, Tensors], Tensors]
EncodeQuery = Callable[[Tensor, Tensors], Tensors]
CoarseSelect = Callable[[Query, Codes, Budget], Selection]
Rerank = Callable[[Query, Selection, Codes, int], Selection]
AllocateStore = Callable[[LayerInfo, int], Store]
Fetch = Callable[[Selection, Store, Tensor], Selected]
Update = Callable[[Tensor, Tensor, Store, list[int]], None]
Attend = Callable[[Query, WorkingSet, Selected | None], tuple[Tensor, Tensor]]
Append = Callable[[Tensor, Tensor, WorkingSet], None]

STEP_STAGES = ("append", "encode_query", "coarse_select", "rerank", "fetch", "attend")
"""The stages that run at every step: those that a captured graph contains."""

SELECTING = ("coarse_select", "rerank")

BindStage = Callable[[Instance, str, int], Stage]
"""Makes a function of an instance's stage in a layer."""


@dataclass(frozen=True)
class Encoder:
    """One producer of codes in a layer; `name` is the retriever's instance name."""

    name: str
    format: str
    block: int
    needs: frozenset[Need]
    allocate_codes: AllocateCodes
    encode: Encode
    fit: Fit | None = None
    is_stale: IsStale | None = None
    encode_query: EncodeQuery | None = None


@dataclass(frozen=True)
class LayerPipeline:
    """The stages of one layer, bound.

    coarse_codes, rerank_codes  which encoder's codes the stage reads; None: empty codes with only the length
    append         None: the core's own, by torch
    rerank         None: the first top_k of coarse_select, which are all that `candidates` asks for
    adapts_top_k   the selection may hold fewer than top_k rows
    reads_steady   stages that want the log-sum-exp over sink and ring
    indexes        the strictest of the retrievers used; "none": no stage but attend
    block          the least common multiple of the encoders' blocks
    host_resident  the store is in host memory, wherever the layer is
    graph_reason   why `graph_safe` is False, empty where it is True
    names          stage to instance, for the manifest
    unwatched      the same without wrappers and trace, None where there are none
    """

    index: int
    attend: Attend
    append: Append | None = None
    encoders: tuple[Encoder, ...] = ()
    coarse_select: CoarseSelect | None = None
    coarse_codes: str | None = None
    rerank: Rerank | None = None
    rerank_codes: str | None = None
    allocate_store: AllocateStore | None = None
    fetch: Fetch | None = None
    update: Update | None = None
    candidates: CandidateRule = field(default_factory=CandidateRule.first_top_k)
    top_k: int = 0
    per_query_head: bool = False
    adapts_top_k: bool = False
    reads_steady: frozenset[str] = frozenset()
    indexes: Indexes = "none"
    block: int = 1
    host_resident: bool = False
    graph_safe: bool = False
    graph_reason: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    unwatched: LayerPipeline | None = None

    @property
    def plain(self) -> LayerPipeline:
        """For rehearsals and warm-ups, which are no calls of a request's: nobody watches them."""
        return self.unwatched or self

    @property
    def wants_queries(self) -> bool:
        """A format of the layer learns from the prompt's queries."""
        return any(encoder.needs & {"query_moment", "recent_queries"} for encoder in self.encoders)

    def slots(self, group: int) -> int:
        """K: rows that the layer's selection can hold per key/value head."""
        return self.top_k * group if self.per_query_head else self.top_k


def bind(
    config: Config, num_layers: int, registry: Registry, retrieval_layers: Collection[int] | None = None
) -> dict[int, LayerPipeline]:
    """The pipelines of the layers that retrieve (None: all of them), by layer index.

    Raises ConfigError for names and ranges that do not exist, BindingError where stages do not fit together,
    PluginContractError and PluginLoadError for what is wrong with a plugin.
    """
    keys = _keys_of_layers(config, num_layers)
    retrievers = Retrievers(config, registry)
    layers = sorted(range(num_layers) if retrieval_layers is None else retrieval_layers)
    resolvers = {key: Resolver(config, retrievers, key) for key in {keys[index] for index in layers}}
    plans = {key: resolver.plan() for key, resolver in sorted(resolvers.items())}
    trace = Trace() if config.debug.trace_hooks else None
    binder = _Binder(config.wrappers, registry, retrievers.made.values(), trace)
    return {index: binder.pipeline(index, plans[keys[index]]) for index in layers}


def _keys_of_layers(config: Config, num_layers: int) -> list[str]:
    """The key of `layers:` that each layer stands under."""
    keys = [DEFAULT] * num_layers
    for key in config.layers:
        for index in layer_range(key) if key != DEFAULT else ():
            if index >= num_layers:
                raise ConfigError(f"layers.{key}: the model has {num_layers} layers, 0 to {num_layers - 1}")
            keys[index] = key
    return keys


class _Binder:
    """Turns plans into pipelines of guarded functions, through pluggy only where a wrapper wants to see the call."""

    def __init__(
        self, wrappers: Sequence[str], registry: Registry, instances: Collection[Instance], trace: Trace | None
    ):
        self.trace = trace
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(StageSpec)
        self.plugins = {one.name: _Plugin(one) for one in instances}
        for name, plugin in self.plugins.items():
            self.manager.register(plugin, name)
        self.wrapped: dict[str, frozenset[str]] = {}
        self.unsafe_wrappers: list[str] = []
        # pluggy calls the wrapper that was registered last first.
        for name in reversed(wrappers):
            self._add_wrapper(name, registry.make_wrapper(name))
        self.manager.check_pending()

    def _add_wrapper(self, name: str, wrapper: object) -> None:
        if name in self.wrapped:
            raise BindingError(f"wrappers: {name!r} is listed twice; list it once")
        self.wrapped[name] = wrapped_stages(wrapper, f"wrapper {name!r}")
        if not getattr(wrapper, "graph_safe", False):
            self.unsafe_wrappers.append(name)
        try:
            self.manager.register(wrapper, f"wrapper {name}")
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginContractError(f"wrapper {name!r}: {' '.join(str(error).split())}") from error

    def pipeline(self, index: int, plan: Plan) -> LayerPipeline:
        pipeline = self._pipeline(index, plan, self._watched)
        if not self.wrapped and self.trace is None:
            return pipeline
        return replace(pipeline, unwatched=self._pipeline(index, plan, self._bound))

    def _pipeline(self, index: int, plan: Plan, bind_stage: BindStage) -> LayerPipeline:
        bound = {stage: bind_stage(one, stage, index) for stage, one in plan.stages.items()}
        last = plan.stages.get("rerank") or plan.stages.get("coarse_select")
        store = plan.stages.get("allocate_store")
        reason = self._graph_reason(plan)
        return LayerPipeline(
            index=index,
            **bound,
            encoders=tuple(_encoder(one, index, bind_stage) for one in plan.encoders),
            coarse_codes=plan.codes.get("coarse_select"),
            rerank_codes=plan.codes.get("rerank"),
            candidates=plan.candidates,
            top_k=plan.top_k,
            per_query_head=last is not None and last.traits.selects_per_query_head,
            adapts_top_k=last is not None and last.traits.adapts_top_k,
            reads_steady=frozenset(
                stage for stage in SELECTING if stage in plan.stages and stage in plan.stages[stage].traits.reads_steady
            ),
            indexes=plan.indexes,
            block=math.lcm(*(one.traits.block for one in plan.encoders)),
            host_resident=store is not None and store.traits.host_resident,
            graph_safe=not reason,
            graph_reason=reason,
            names={stage: one.name for stage, one in plan.stages.items()},
            unwatched=None,
        )

    def _bound(self, one: Instance, stage: str, index: int) -> Stage:
        return _guarded(one.stages[stage], f"in {stage} of {one.label}, layer {index}")

    def _watched(self, one: Instance, stage: str, index: int) -> Stage:
        """The stage inside of its wrappers, and of the trace."""
        wrappers = [name for name, stages in self.wrapped.items() if stage in stages]
        function, note = one.stages[stage], f"in {stage} of {one.label}, layer {index}"
        if wrappers:
            function = self._wrapped(one, stage)
            note += f", inside {', '.join(repr(name) for name in reversed(wrappers))}"
        if self.trace is not None:
            function = self.trace.around(function, stage, one.name, index)
        return _guarded(function, note)

    def _wrapped(self, one: Instance, stage: str) -> Stage:
        others = [plugin for name, plugin in self.plugins.items() if name != one.name]
        call, names = self.manager.subset_hook_caller(stage, remove_plugins=others), STAGES[stage]

        def wrapped(*arguments: object) -> object:
            return call(**dict(zip(names, arguments, strict=True)))

        return wrapped

    def _graph_reason(self, plan: Plan) -> str:
        """The trace, or the first stage or wrapper of a step that is not declared graph-safe; empty where all are."""
        if self.trace is not None:
            return REASON
        step = [("encode_query", one) for one in plan.encoders if "encode_query" in one.stages]
        step += [(stage, one) for stage, one in plan.stages.items() if stage in STEP_STAGES]
        for stage, one in step:
            if not one.traits.graph_safe:
                return f"{stage} of {one.label} does not declare graph_safe"
            for name in self.unsafe_wrappers:
                if stage in self.wrapped[name]:
                    return f"wrapper {name!r} around {stage} does not declare graph_safe"
        return ""


def _encoder(one: Instance, index: int, bind_stage: BindStage) -> Encoder:
    assert one.traits.format is not None
    bound = {stage: bind_stage(one, stage, index) for stage in FORMAT_STAGES if stage in one.stages}
    return Encoder(one.name, one.traits.format, one.traits.block, frozenset(one.traits.needs), **bound)


class _Plugin:
    """One retriever as pluggy sees it: compared by identity, its hooks under the contract's names and arguments."""

    def __init__(self, one: Instance):
        for stage, function in one.stages.items():
            setattr(self, stage, hookimpl(_as_hook(function, stage)))


def _as_hook(function: Stage, stage: str) -> Stage:
    @functools.wraps(getattr(StageSpec, stage))
    def hook(*arguments: object) -> object:
        return function(*arguments)

    return hook


def _guarded(function: Stage, note: str) -> Stage:
    """The function, adding to what it raises where that was; a try costs nothing while nothing is raised."""

    def guarded(*arguments: object) -> object:
        try:
            return function(*arguments)
        except Exception as error:
            error.add_note(note)
            raise

    return guarded
