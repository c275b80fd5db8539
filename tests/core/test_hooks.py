"""Every hook: a request calls it with what the contract names and gets that back, and `check_retriever` drives it."""

from __future__ import annotations

import functools
import types
from collections.abc import Generator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from fakes import importable, plugin

from pariskv.attention import TorchAttend
from pariskv.errors import PluginContractError
from pariskv.hookspecs import Register, StageSpec, hookimpl
from pariskv.registry import BUILTIN_PLUGINS, Registry
from pariskv.stages import STAGES
from pariskv.testing import TinyRuns, check_retriever
from pariskv.types import WorkingSet
from pariskv.working import slots_of

Calls = dict[str, list[tuple[tuple[object, ...], object]]]


class Appending(TorchAttend):
    """The attention of torch with an `append` of its own, which is optional."""

    graph_safe = False

    @hookimpl
    def append(self, keys: Any, values: Any, working: WorkingSet) -> None:
        slots = slots_of(working.length, working.sink, working.steady.shape[1] - working.sink)
        for row in working.active.nonzero().flatten().tolist():
            working.rows[row, :, slots[row]] = torch.stack((keys, values), dim=3)[row, :, 0]
            working.steady[row, slots[row]] = True
        working.length.add_(working.active)


def recorder(calls: Calls) -> object:
    """A wrapper around every stage."""

    def around(stage: str) -> Any:
        @functools.wraps(getattr(StageSpec, stage))
        def record(self: object, *arguments: object) -> Generator[None, Any, Any]:
            result = yield
            calls.setdefault(stage, []).append((arguments, result))
            return result

        return hookimpl(wrapper=True)(record)

    return type("Recorder", (), {stage: around(stage) for stage in STAGES})()


@pytest.fixture(scope="module")
def calls(tiny_runs: TinyRuns) -> Calls:
    """What a tiny model's request asked of ParisKV, of a store and of an attention that appends."""
    found: Calls = {}

    def offer(register: Register) -> None:
        register("appending", Appending)
        register.wrapper("recorder", lambda: recorder(found))

    with importable(recording=plugin(offer)), pytest.MonkeyPatch.context() as patch:
        registry = Registry.load((*BUILTIN_PLUGINS, "recording"), entry_points=False)
        patch.setattr(Registry, "load", lambda: registry)
        run = tiny_runs.compare(
            {"default": {"retriever": "pariskv", "top_k": 1000}},
            wrappers=["recorder"],
            runtime={"attend": "appending"},
        )
    assert run.tokens == run.dense_tokens
    return found


def fits(value: object, hint: Any) -> bool:
    """Whether a value has the type that an annotation names, as far down as containers go."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(map(fits, value, inner))
    if origin is list:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(one, inner[1]) for one in value.values())
    return isinstance(value, hint)


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_calls_the_hook_as_the_contract_says(stage: str, calls: Calls) -> None:
    hints = get_type_hints(getattr(StageSpec, stage))
    returned = hints.pop("return")
    assert list(hints) == list(STAGES[stage])
    assert calls.get(stage), f"{stage} was never called"
    for arguments, result in calls[stage]:
        for name, value in zip(STAGES[stage], arguments, strict=True):
            assert fits(value, hints[name]), (name, value)
        assert fits(result, returned), result


def implementing(stage: str) -> Any:
    """A retriever that implements the stage and keeps the contract."""
    registry = Registry.load(entry_points=False)
    retrievers = [Appending(), *(registry.make(name, {}) for name in ("pariskv", "resident"))]
    return next(one for one in retrievers if hasattr(one, stage))


@pytest.mark.parametrize("stage", STAGES)
def test_check_retriever_drives_the_hook(stage: str) -> None:
    retriever = implementing(stage)
    lengths = (64, 32, 0)
    check_retriever(retriever, lengths=lengths, top_k=8)

    @hookimpl
    @functools.wraps(getattr(StageSpec, stage))
    def broken(*arguments: object) -> object:
        raise RuntimeError("boom")

    retriever.__class__ = type("Broken", (type(retriever),), {stage: broken})
    with pytest.raises(PluginContractError, match=rf"^Broken\.{stage}: raised RuntimeError: boom"):
        check_retriever(retriever, lengths=lengths, top_k=8)
