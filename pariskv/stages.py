"""What one retriever object implements and declares, checked against the contract in `pariskv.hookspecs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pluggy

from pariskv.errors import PluginContractError
from pariskv.hookspecs import PROJECT, Need, Retriever, Selecting, StageSpec
from pariskv.structured import did_you_mean

Stage = Callable[..., Any]

STAGES: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)[1:]
    for name, spec in vars(StageSpec).items()
    if hasattr(spec, f"{PROJECT}_spec")
}
"""Every stage of the contract, in its order, with the names of its arguments."""

FORMAT_STAGES = ("allocate_codes", "fit", "is_stale", "encode", "encode_query")
"""The stages that belong to the codes that a retriever makes."""


@dataclass(frozen=True)
class Traits:
    """What a retriever declares about itself; see `pariskv.hookspecs.Retriever`."""

    format: str | None
    reads: str | None
    block: int
    indexes: Literal["all", "prompt", "none"]
    needs: frozenset[Need]
    selects_per_query_head: bool
    adapts_top_k: bool
    candidate_ratios: tuple[tuple[int, float], ...] | None
    reads_steady: frozenset[Selecting]
    graph_safe: bool
    host_resident: bool


def stages_of(retriever: object, where: str) -> dict[str, Stage]:
    """The stages that a retriever implements, in the contract's order, as bound functions.

    Raises PluginContractError, beginning with `where`, for what could not be called positionally.
    """
    found: dict[str, Stage] = {}
    for stage, attribute, is_wrapper in _implementations(retriever, where):
        if is_wrapper:
            raise PluginContractError(f"{where}: {attribute} is a hook wrapper; offer it with `register.wrapper(...)`")
        found[stage] = getattr(retriever, attribute)
        _check_signature(found[stage], stage, f"{where}: {attribute}")
    return {stage: found[stage] for stage in STAGES if stage in found}


def wrapped_stages(wrapper: object, where: str) -> frozenset[str]:
    """The stages that a wrapper plugin is called around."""
    found = set()
    for stage, attribute, is_wrapper in _implementations(wrapper, where):
        if not is_wrapper:
            raise PluginContractError(f"{where}: {attribute} must be marked @hookimpl(wrapper=True)")
        found.add(stage)
    return frozenset(found)


def _implementations(plugin: object, where: str) -> Iterator[tuple[str, str, bool]]:
    """(stage, attribute, whether it is a wrapper) of everything marked @hookimpl; no stage comes twice."""
    manager, owner = pluggy.PluginManager(PROJECT), dict[str, str]()
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        stage = options.get("specname") or attribute
        if stage not in STAGES:
            raise PluginContractError(
                f"{where}: {attribute} is marked @hookimpl, but {stage!r} is no stage"
                f"{did_you_mean(stage, STAGES)}; stages: {', '.join(STAGES)}"
            )
        if stage in owner:
            raise PluginContractError(f"{where}: {owner[stage]} and {attribute} both implement {stage}; keep one")
        owner[stage] = attribute
        yield stage, attribute, bool(options.get("wrapper") or options.get("hookwrapper"))


def _check_signature(function: Stage, stage: str, where: str) -> None:
    """The core calls by position: exactly the contract's names, in its order."""
    parameters = inspect.signature(function).parameters.values()
    wanted = f"wanted exactly ({', '.join(STAGES[stage])})"
    given = ", ".join(map(str, (parameter.replace(annotation=parameter.empty) for parameter in parameters)))
    problem = None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problem = f"takes {parameter.replace(annotation=parameter.empty)}"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            problem = f"takes {parameter.name} by keyword only"
        elif parameter.default is not parameter.empty:
            problem = f"gives {parameter.name} a default"
        if problem:
            raise PluginContractError(f"{where}({given}) {problem}; {wanted}")
    if tuple(parameter.name for parameter in parameters) != STAGES[stage]:
        raise PluginContractError(f"{where}({given}) has other arguments than the contract; {wanted}")


def traits_of(retriever: object, stages: dict[str, Stage], where: str) -> Traits:
    """A retriever's declarations, the contract's defaults where it is silent.

    Raises PluginContractError, beginning with `where`, for values and combinations that mean nothing.
    """
    traits = Traits(**{name: getattr(retriever, name, getattr(Retriever, name)) for name in Traits.__annotations__})
    _check_values(traits, where)
    made = [stage for stage in FORMAT_STAGES if stage in stages]
    if made and not {"encode", "allocate_codes"} <= set(made):
        missing = next(stage for stage in ("encode", "allocate_codes") if stage not in stages)
        raise PluginContractError(f"{where}: implements {made[0]} without {missing}; a format needs both")
    if "is_stale" in made and "fit" not in made:
        raise PluginContractError(f"{where}: implements is_stale without fit; there is no state that could be stale")
    if made and traits.format is None:
        raise PluginContractError(f"{where}: implements encode, but its `format` is None; name the format")
    return traits


def _check_values(traits: Traits, where: str) -> None:
    def refuse(name: str, wanted: str) -> PluginContractError:
        return PluginContractError(f"{where}: {name} is {getattr(traits, name)!r}, wanted {wanted}")

    for name in ("format", "reads"):
        if not (getattr(traits, name) is None or (isinstance(getattr(traits, name), str) and getattr(traits, name))):
            raise refuse(name, "None or a name")
    if not isinstance(traits.block, int) or isinstance(traits.block, bool) or traits.block < 1:
        raise refuse("block", "an integer >= 1")
    if traits.indexes not in ("all", "prompt", "none"):
        raise refuse("indexes", "'all', 'prompt' or 'none'")
    if not isinstance(traits.needs, frozenset | set) or not traits.needs <= set(get_args(Need)):
        raise refuse("needs", f"a frozenset of {', '.join(get_args(Need))}")
    if not isinstance(traits.reads_steady, frozenset | set) or not traits.reads_steady <= set(get_args(Selecting)):
        raise refuse("reads_steady", f"a frozenset of {', '.join(get_args(Selecting))}")
    if traits.candidate_ratios is not None:
        starts, ratios = zip(*traits.candidate_ratios, strict=True)
        if starts[0] != 0 or list(starts) != sorted(set(starts)) or not all(0 < ratio <= 1 for ratio in ratios):
            raise refuse("candidate_ratios", "ascending lengths, the first 0, each with a ratio in (0, 1]")
    for name in ("selects_per_query_head", "adapts_top_k", "graph_safe", "host_resident"):
        if not isinstance(getattr(traits, name), bool):
            raise refuse(name, "a bool")
