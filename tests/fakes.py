"""Tiny retrievers and plugin modules for the tests of registry and binding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pariskv.binding import LayerPipeline, bind
from pariskv.config import Config, parse_config
from pariskv.errors import ParisKVError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.registry import Registry
from pariskv.types import Budget, Codes, LayerInfo, Query, Selected, Selection, Store, Tensors, WorkingSet

INFO = LayerInfo(0, 1, 1, 1, 4, torch.float32, torch.device("cpu"), 0.5)
HEADS = torch.zeros(1, 1, 1, 4)


class Format(Retriever):
    """Makes the codes `fmt`."""

    format = "fmt"
    graph_safe = True

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        return Codes.empty(layer, capacity)

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"owner": keys}


class Coarse(Retriever):
    """Chooses candidates from the codes `fmt` of someone else."""

    reads: str | None = "fmt"
    graph_safe = True

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        return Selection(torch.full((1, 1, budget.width), 7, dtype=torch.int32))


class Rerank(Retriever):
    reads: str | None = "fmt"
    graph_safe = True

    @hookimpl
    def rerank(self, query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
        return Selection(selection.indices[..., :top_k])


class Full(Format, Coarse, Rerank):
    """A format, and both stages that read it."""

    reads = None

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        return {"heads": heads}


class Memory(Retriever):
    """The store: everything that keeps keys and values."""

    graph_safe = True

    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        raise NotImplementedError("memory has no store")

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        return Selected(selection.indices >= 0)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        return None


class Attend(Retriever):
    graph_safe = True

    @hookimpl
    def attend(self, query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
        return query.heads, query.heads


class Dense(Retriever):
    indexes = "none"
    graph_safe = True


FAKES: dict[str, Callable[[], object]] = {
    "pariskv": Full,
    "coarse": Coarse,
    "rerank": Rerank,
    "codes": Format,
    "resident": Memory,
    "torch": Attend,
    "dense": Dense,
}


def plugin(register_all: Callable[[Register], None]) -> ModuleType:
    """A plugin module whose hook is the given function."""
    module = ModuleType("fake_plugin")

    @hookimpl
    def register_retrievers(register: Register) -> None:
        register_all(register)

    module.register_retrievers = register_retrievers  # type: ignore[attr-defined]
    return module


@contextmanager
def importable(**modules: ModuleType) -> Iterator[tuple[str, ...]]:
    """The modules can be imported by name inside the block."""
    sys.modules.update(modules)
    try:
        yield tuple(modules)
    finally:
        for name in modules:
            del sys.modules[name]


def registry_of(
    retrievers: dict[str, Callable[..., object]] | None = None,
    wrappers: dict[str, Callable[[], object]] | None = None,
    options: dict[str, type] | None = None,
) -> Registry:
    """A registry with the standard fakes, and these beside or instead of them."""

    def register_all(register: Register) -> None:
        for name, factory in {**FAKES, **(retrievers or {})}.items():
            register(name, factory, options=(options or {}).get(name))
        for name, factory in (wrappers or {}).items():
            register.wrapper(name, factory)

    with importable(fake_builtin=plugin(register_all)) as names:
        return Registry.load(names, entry_points=False)


def config_of(layers: str = "{}", more: str = "") -> Config:
    return parse_config(f"layers: {layers}\n{more}")


def pipelines(layers: str = "{}", more: str = "", layer_count: int = 4, **registry: Any) -> dict[int, LayerPipeline]:
    """The bound pipelines of a small model, from the YAML of `layers:` and of further sections."""
    return bind(config_of(layers, more), layer_count, registry_of(**registry))


def refusal(kind: type[ParisKVError], layers: str = "{}", more: str = "", **registry: Any) -> str:
    """The message with which exactly this error refuses to bind."""
    with pytest.raises(kind) as caught:
        pipelines(layers, more, **registry)
    assert type(caught.value) is kind
    return str(caught.value)


def budget(width: int = 3) -> Budget:
    return Budget(width, torch.tensor([width], dtype=torch.int32))


def codes() -> Codes:
    return Codes.empty(INFO, 8)


def query() -> Query:
    return Query(HEADS, None, 0.5)


def install(folder: Path, distribution: str, entry: str, source: str, version: str = "1.2") -> None:
    """Lay a distribution with one plugin module `{entry}_module` into a folder, as pip would."""
    (folder / f"{entry}_module.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[pariskv]\n{entry} = {entry}_module\n")


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int) -> list[int]:
    """Let a method's call of that number be out of memory; the list holds how many calls there were.

    The error is made then, and kept by nobody: its traceback holds what the frames hold.
    """
    original, calls = getattr(owner, method), [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise MemoryError("of the host")
        return original(*arguments)

    monkeypatch.setattr(owner, method, failing)
    return calls
