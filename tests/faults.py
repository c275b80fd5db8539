"""Requests that go wrong: a hook that raises from some token on, and the stores that were made until then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pariskv.binding import LayerPipeline, bind
from pariskv.integrations import transformers
from pariskv.layer import LayerState
from pariskv.zone import Zone

HOOKS = ["encode", "coarse_select", "rerank", "fetch", "update"]


def give_up() -> None:
    raise RuntimeError("the retriever gave up")


def raise_beyond(
    monkeypatch: pytest.MonkeyPatch, stage: str, layer: int, tokens: int, fault: Callable[[], object] = give_up
) -> None:
    """Have a layer's hook do the fault, which raises, whenever a row with more than so many tokens is decoded."""
    longest, count_step, begin_prompt = 0, LayerState.count_step, LayerState._begin_prompt

    def noting(self: LayerState) -> None:
        nonlocal longest
        longest = max(n for n, is_active in zip(self.lengths, self.active_rows, strict=True) if is_active)
        count_step(self)

    def begins(self: LayerState, chunk: int) -> None:
        nonlocal longest
        longest = 0
        begin_prompt(self, chunk)

    def raising(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if longest > tokens:
                fault()
            return hook(*arguments)

        return call

    def binding(*arguments: Any) -> dict[int, LayerPipeline]:
        pipelines = bind(*arguments)
        one = pipelines[layer]
        encoders = tuple(replace(encoder, encode=raising(encoder.encode)) for encoder in one.encoders)
        changed: Any = {"encoders": encoders} if stage == "encode" else {stage: raising(getattr(one, stage))}
        return {**pipelines, layer: replace(one, **changed)}

    monkeypatch.setattr(LayerState, "count_step", noting)
    monkeypatch.setattr(LayerState, "_begin_prompt", begins)
    monkeypatch.setattr(transformers, "bind", binding)


def noted_stores(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every store that is made from now on."""
    stores: list[weakref.ref[Any]] = []
    reserve = Zone.reserve

    def noting(self: Zone, tokens: int, planned: int = 0) -> None:
        is_new = self.store is None
        reserve(self, tokens, planned)
        if is_new:
            stores.append(weakref.ref(self.store))

    monkeypatch.setattr(Zone, "reserve", noting)
    return stores
