"""Which instance gives each stage of a layer: names in the YAML to retrievers, checked but not yet bound.

Each stage goes to the first that answers: the range's key for the stage, the range's `retriever` if
it implements the stage, the default's key, the default's `retriever`; `fetch`, `update` and
`allocate_store` then fall to the `store`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch

from pariskv.budget import CandidateRule
from pariskv.config import DEFAULT, DEFAULT_LAYER, Config, LayerConfig
from pariskv.errors import BindingError
from pariskv.registry import Registry
from pariskv.stages import Stage, Traits, stages_of, traits_of

logger = logging.getLogger(__name__)

Indexes = Literal["all", "prompt", "none"]

AUTO_STORE = "resident"
AUTO_ATTEND = "torch"
GPU_STORE = "uva"
GPU_ATTEND = "numba"
ATTEND_STAGES = ("append", "attend")
GPU_MODULES = ("numba_cuda", "cuda")
NO_RERANK = "none"
STRICTNESS: tuple[Indexes, ...] = ("all", "prompt", "none")


def for_device(config: Config, device: torch.device) -> Config:
    """The configuration with `store: auto` and `runtime.attend: auto` as they are on a GPU; unchanged elsewhere."""
    if device.type != "cuda":
        return config
    missing = [name for name in GPU_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        logger.warning("no CUDA kernels without %s: pip install 'pariskv[cuda]'", ", ".join(missing))
        return config
    store = GPU_STORE if config.store == "auto" else config.store
    attend = GPU_ATTEND if config.runtime.attend == "auto" else config.runtime.attend
    return replace(config, store=store, runtime=replace(config.runtime, attend=attend))


@dataclass(frozen=True, eq=False)
class Instance:
    """A retriever that was made, with what it implements and declares.

    label  how messages call it: `retriever 'x' (type y from distribution z 1.2)`
    """

    name: str
    label: str
    retriever: object
    stages: Mapping[str, Stage]
    traits: Traits


@dataclass(frozen=True)
class Plan:
    """Which instance gives each stage of the layers under one key of `layers:`."""

    stages: Mapping[str, Instance]
    encoders: tuple[Instance, ...]
    codes: Mapping[str, str | None]
    candidates: CandidateRule
    top_k: int
    indexes: Indexes


class Retrievers:
    """The retrievers that the configuration names, each made once, when it is first asked for."""

    def __init__(self, config: Config, registry: Registry):
        self.config = config
        self.registry = registry
        self.made: dict[str, Instance] = {}
        for name in config.retrievers:
            type_name, options = self._type_and_options(name)
            if type_name not in registry.retrievers:
                raise registry.unknown(type_name, f"retrievers.{name}")
            registry.check(type_name, options, name)
        for key, layer in config.layers.items():
            for stage, names in _names_in(layer):
                for name in names:
                    self._check_known(name, f"layers.{key}.{stage}")

    def get(self, name: str, where: str) -> Instance:
        if name not in self.made:
            self._check_known(name, where)
            type_name, options = self._type_and_options(name)
            label = f"retriever {name!r} (type {type_name} from distribution {self.registry.origin(type_name)})"
            retriever = self.registry.make(type_name, options, name)
            stages = stages_of(retriever, label)
            traits = traits_of(retriever, stages, label)
            self.made[name] = Instance(name, label, retriever, stages, traits)
        return self.made[name]

    def with_stage(self, name: str, stage: str, where: str) -> Instance:
        instance = self.get(name, where)
        if stage not in instance.stages:
            has = ", ".join(instance.stages) or "none"
            unmarked = (
                f" (its method {stage} is not marked @hookimpl)"
                if callable(getattr(instance.retriever, stage, None))
                else ""
            )
            raise BindingError(f"{where}: retriever {name!r} does not implement {stage}{unmarked}; its stages: {has}")
        return instance

    def makers(self, format: str) -> list[str]:
        """Names that could be written in `encode:` to get a format: instances, and types that need no options."""
        types = {row.name for row in self.registry.listing() if row.format == format and "encode" in row.stages}
        made = {one.name for one in self.made.values() if one.traits.format == format and "encode" in one.stages}
        return sorted(
            made | types | {name for name in self.config.retrievers if self._type_and_options(name)[0] in types}
        )

    def _type_and_options(self, name: str) -> tuple[str, dict[str, Any]]:
        options = dict(self.config.retrievers.get(name, {}))
        return str(options.pop("type", name)), options

    def _check_known(self, name: str, where: str) -> None:
        if name not in self.config.retrievers and name not in self.registry.retrievers:
            raise self.registry.unknown(name, where, also=self.config.retrievers)


def _names_in(layer: LayerConfig) -> Iterator[tuple[str, list[str]]]:
    for stage in ("retriever", "encode", "coarse_select", "rerank", "fetch", "update", "codes_from"):
        value = getattr(layer, stage)
        names = value if isinstance(value, list) else [value] if value is not None else []
        yield stage, [name for name in names if (stage, name) != ("rerank", NO_RERANK)]


class Resolver:
    """Chooses the instance of every stage for the layers under one key."""

    def __init__(self, config: Config, retrievers: Retrievers, key: str):
        self.config = config
        self.retrievers = retrievers
        self.where = f"layers.{key}"
        default = config.layers.get(DEFAULT, DEFAULT_LAYER)
        self.own = config.layers.get(key, default)
        self.sections = [(self.where, self.own)] + ([(f"layers.{DEFAULT}", default)] if key != DEFAULT else [])

    def plan(self) -> Plan:
        top_k = self._inherited("top_k")
        attend = AUTO_ATTEND if self.config.runtime.attend == "auto" else self.config.runtime.attend
        attends = self.retrievers.with_stage(attend, "attend", "runtime.attend")
        stages = {stage: attends for stage in ATTEND_STAGES if stage in attends.stages}
        rule = CandidateRule.first_top_k()
        retriever = self._retriever()
        if retriever.traits.indexes == "none":
            self._refuse_unused_stages(retriever)
            return Plan(stages, (), {}, rule, top_k, "none")
        stages |= self._storage(top_k > 0)
        codes: dict[str, str | None] = {}
        encoders: tuple[Instance, ...] = ()
        if top_k > 0:
            selection = self._selection()
            stages |= selection
            encoders, codes = self._encoders(retriever, selection)
            if "rerank" in selection:
                ratios = selection["coarse_select"].traits.candidate_ratios
                rule = CandidateRule.parse(self._inherited("candidates"), ratios)
        return Plan(stages, encoders, codes, rule, top_k, self._indexes(stages, encoders, retriever))

    def _retriever(self) -> Instance:
        where, name = next((where, layer.retriever) for where, layer in self.sections if layer.retriever)
        return self.retrievers.get(name, f"{where}.retriever")

    def _inherited(self, key: str) -> Any:
        return next((value for _, layer in self.sections if (value := getattr(layer, key)) is not None), None)

    def _answer(self, stage: str) -> Instance | None:
        """The first that answers for a stage; None where nobody does, or for `rerank: none`."""
        for where, layer in self.sections:
            named = getattr(layer, stage, None)
            if (stage, named) == ("rerank", NO_RERANK):
                return None
            if named is not None:
                return self.retrievers.with_stage(named, stage, f"{where}.{stage}")
            if layer.retriever is not None:
                instance = self.retrievers.get(layer.retriever, f"{where}.retriever")
                if stage in instance.stages:
                    return instance
        return None

    def _selection(self) -> dict[str, Instance]:
        coarse, rerank = self._answer("coarse_select"), self._answer("rerank")
        if coarse is None:
            tried = " and ".join(repr(layer.retriever) for _, layer in self.sections if layer.retriever)
            raise BindingError(
                f"{self.where}: no retriever implements coarse_select (asked {tried}); name one that does: "
                f"`coarse_select: NAME` or `retriever: NAME`"
            )
        return {"coarse_select": coarse} | ({"rerank": rerank} if rerank else {})

    def _storage(self, with_fetch: bool) -> dict[str, Instance]:
        """fetch and update, then the store of whoever brings one, asked in the order update, fetch, store."""
        name = AUTO_STORE if self.config.store == "auto" else self.config.store
        found: dict[str, Instance] = {}
        for stage in ("update", "fetch") if with_fetch else ("update",):
            found[stage] = self._answer(stage) or self.retrievers.with_stage(name, stage, "store")
        owners = [owner for owner in (*found.values(), self._answer("allocate_store")) if owner is not None]
        owner = next((owner for owner in owners if "allocate_store" in owner.stages), None)
        found["allocate_store"] = owner or self.retrievers.with_stage(name, "allocate_store", "store")
        return found

    def _encoders(
        self, retriever: Instance, selection: Mapping[str, Instance]
    ) -> tuple[tuple[Instance, ...], dict[str, str | None]]:
        """The producers that the layer keeps, and which of them each reader reads."""
        named = self._named_encoders()
        codes_from = self._inherited("codes_from")
        chosen = self.retrievers.with_stage(codes_from, "encode", f"{self.where}.codes_from") if codes_from else None
        present = {one.name: one for one in (retriever, *selection.values(), *named) if "encode" in one.stages}
        sources = {stage: self._source(stage, reader, chosen, present) for stage, reader in selection.items()}
        if chosen is not None and self.own.codes_from and chosen not in sources.values():
            reads = ", ".join(f"{stage} reads {_wanted(reader)}" for stage, reader in selection.items())
            raise BindingError(
                f"{self.where}.codes_from: {chosen.name!r} makes {chosen.traits.format}, which no stage here reads "
                f"({reads}); name a producer of one of these"
            )
        kept = {one.name: one for one in (*sources.values(), *named) if one is not None}
        return tuple(kept.values()), {stage: source.name if source else None for stage, source in sources.items()}

    def _named_encoders(self) -> list[Instance]:
        names = self._inherited("encode") or []
        return [
            self.retrievers.with_stage(name, "encode", f"{self.where}.encode")
            for name in ([names] if isinstance(names, str) else names)
        ]

    def _source(
        self, stage: str, reader: Instance, chosen: Instance | None, present: Mapping[str, Instance]
    ) -> Instance | None:
        wanted = _wanted(reader)
        if wanted is None:
            return None
        if chosen is not None and chosen.traits.format == wanted:
            return chosen
        makers = [one for one in present.values() if one.traits.format == wanted]
        if reader in makers:
            return reader
        if len(makers) == 1:
            return makers[0]
        self._refuse_source(stage, reader, wanted, makers)

    def _refuse_source(self, stage: str, reader: Instance, wanted: str, makers: list[Instance]) -> NoReturn:
        start = f"{self.where}: {stage} of {reader.name!r} reads the format {wanted}, which "
        if makers:
            names = ", ".join(repr(one.name) for one in makers)
            raise BindingError(
                f"{start}several retrievers of the layer make: {names}; write `codes_from: {makers[0].name}` or another"
            )
        known = self.retrievers.makers(wanted)
        advice = f"write `encode: {known[0]}` (made by: {', '.join(known)})" if known else "no plugin here makes it"
        raise BindingError(f"{start}no retriever of the layer makes; {advice}")

    def _refuse_unused_stages(self, retriever: Instance) -> None:
        for stage, names in _names_in(self.own):
            if stage != "retriever" and names:
                raise BindingError(
                    f"{self.where}.{stage}: {', '.join(names)} would never run, because {retriever.name!r} keeps every "
                    f"token of the layer dense; remove the key or choose another `retriever:`"
                )

    def _indexes(self, stages: Mapping[str, Instance], encoders: tuple[Instance, ...], retriever: Instance) -> Indexes:
        used = [retriever, *encoders, *(one for stage, one in stages.items() if stage not in ATTEND_STAGES)]
        strictest = max(used, key=lambda one: STRICTNESS.index(one.traits.indexes))
        if strictest.traits.indexes == "none":
            raise BindingError(f"{self.where}: {strictest.name!r} indexes nothing and cannot give single stages")
        return strictest.traits.indexes


def _wanted(reader: Instance) -> str | None:
    return reader.traits.reads or reader.traits.format
