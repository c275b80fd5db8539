"""What a configuration comes to: which retriever gives each stage, and which of its keys have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from pariskv.config import DEFAULT, DEFAULT_LAYER, Config, LayerConfig
from pariskv.registry import Registry
from pariskv.resolve import NO_RERANK, Plan, Resolver, Retrievers
from pariskv.stages import STAGES

FOR_SELECTING = ("encode", "coarse_select", "rerank", "fetch", "candidates", "codes_from")
"""Keys of a layer that nothing reads where no token is selected."""


def explain(config: Config, registry: Registry) -> list[str]:
    """A line for every key of `layers:`, then a note for every key of the file that has no effect.

    `auto` is taken as written; raises what `pariskv.binding.bind` raises of names and stages.
    """
    retrievers = Retrievers(config, registry)
    plans = {key: Resolver(config, retrievers, key).plan() for key in config.layers}
    lines = [f"layers.{key}: {_givers(config, key, plan)}" for key, plan in plans.items()]
    return lines + [f"note: {text}" for text in (*_unused_keys(config, plans), *_unused_instances(config))]


def layer_retrievers(config: Config) -> list[str]:
    """The retrievers that choose tokens, as `layers:` names them; the default's first."""
    names: dict[str, None] = {}
    for key in sorted(config.layers, key=lambda key: key != DEFAULT):
        layer = config.layers[key]
        names |= dict.fromkeys(_names(layer, "retriever") + _names(layer, "coarse_select") + _names(layer, "rerank"))
    return list(names)


def _names(layer: LayerConfig, key: str) -> list[str]:
    """The retrievers that a key names."""
    value = getattr(layer, key)
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name is not None and (key, name) != ("rerank", NO_RERANK)]


def _all_names(layer: LayerConfig) -> set[str]:
    keys = (item.name for item in fields(layer) if item.name not in ("candidates", "top_k"))
    return {name for key in keys for name in _names(layer, key)}


def _givers(config: Config, key: str, plan: Plan) -> str:
    """Retrievers with the stages that they give: `pariskv (encode, coarse_select), inherited exact (rerank)`."""
    given: dict[str, set[str]] = {one.name: {"encode"} for one in plan.encoders}
    for stage, one in plan.stages.items():
        given.setdefault(one.name, set()).add(stage)
    order = list(STAGES)
    first = sorted(given, key=lambda name: min(map(order.index, given[name])))
    said = {name: ", ".join(sorted(given[name], key=order.index)) for name in first}
    if plan.indexes == "none":
        dense = config.layers[key].retriever or config.layers[DEFAULT].retriever
        said = {str(dense): "every token stays dense"} | said
    inherited = _all_names(config.layers[DEFAULT]) - _all_names(config.layers[key])
    return ", ".join(f"{'inherited ' if name in inherited else ''}{name} ({text})" for name, text in said.items())


def _unused_keys(config: Config, plans: Mapping[str, Plan]) -> Iterator[str]:
    """Keys that no layer reads; a key of `default` is read by the ranges that do not say otherwise, too."""
    for key, layer in config.layers.items():
        for item in fields(layer):
            name = item.name
            if not _is_written(key, layer, name):
                continue
            heirs = [
                other
                for other, one in config.layers.items()
                if other == key or (key == DEFAULT and getattr(one, name) is None)
            ]
            reasons = [_why_unused(name, layer, plans[heir]) for heir in heirs]
            if all(reasons):
                yield f"layers.{key}.{name} has no effect: {reasons[0]}"


def _is_written(key: str, layer: LayerConfig, name: str) -> bool:
    """Whether the file says it, as far as that can be seen: a default that is written looks like none."""
    value = getattr(layer, name)
    return value is not None and (key != DEFAULT or value != getattr(DEFAULT_LAYER, name))


def _why_unused(name: str, layer: LayerConfig, plan: Plan) -> str:
    """Why a key has no effect on the layers of a plan; empty where it has one."""
    if name == "retriever":
        used = {one.name for one in (*plan.stages.values(), *plan.encoders)}
        return "" if plan.indexes == "none" or layer.retriever in used else "other keys name a retriever for each stage"
    if plan.indexes == "none":
        return "the layer's retriever keeps every token dense"
    if plan.top_k == 0 and name in FOR_SELECTING:
        return "top_k is 0, so no token is selected"
    if name == "candidates" and "rerank" not in plan.stages:
        return "nothing reranks, so coarse_select returns the top_k itself"
    return ""


def _unused_instances(config: Config) -> Iterator[str]:
    used = {config.store, config.runtime.attend}.union(*map(_all_names, config.layers.values()))
    for name in config.retrievers:
        if name not in used:
            yield f"retrievers.{name} has no effect: no layer names it (`pariskv compare --retrievers` can)"
