"""A stage that declares graph_safe asks the host nothing, so that a CUDA graph can hold it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from pariskv_plugins.exact import COMBINE, Exact, Options
from pariskv_plugins.paris import ParisPaper
from pariskv_plugins.resident import Resident
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pariskv.types import Budget, LayerInfo, Query

ASKS_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount")


class NoHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators whose result, or its shape, goes through the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for argument in args
            for index in (argument if isinstance(argument, list | tuple) else [])
        )
        assert name not in ASKS_THE_HOST, name
        assert not by_mask, f"{name} by a mask"
        return func(*args, **(kwargs or {}))


def no_host() -> AbstractContextManager[object]:
    return cast(AbstractContextManager[object], NoHost())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "make", [ParisPaper, *(lambda name=name: Exact(Options(name)) for name in (*COMBINE, "per_query_head"))]
)
def test_a_step_never_asks_the_host(make: Callable[[], Any]) -> None:
    retriever, resident = make(), Resident()
    assert retriever.graph_safe
    layer = LayerInfo(0, 2, 3, 2, 64, torch.float32, torch.device("cpu"), 0.125)
    keys = torch.randn(2, 3, 100, 64, generator=torch.Generator().manual_seed(0))
    heads = keys[:, :, :2].contiguous()
    codes, store = retriever.allocate_codes(layer, 128), resident.allocate_store(layer, 128)
    codes.append([0, 1], [0, 0], retriever.encode(keys, keys, {}), 100)
    codes.length.fill_(100)
    resident.update(keys, keys, store, [0, 1])
    budget = Budget(50, torch.tensor([50, 20], dtype=torch.int32))
    slots = torch.zeros(2, 3, 2 * 10, 2, 64)

    def step() -> Tensor:
        encoded = retriever.encode_query(heads, {}) if hasattr(retriever, "encode_query") else None
        query = Query(heads, encoded, 0.125, 30.0)
        selection = retriever.rerank(query, retriever.coarse_select(query, codes, budget), codes, 10)
        return resident.fetch(selection, store, slots[:, :, : selection.indices.shape[2]]).valid

    warmed_up = step()
    with no_host():
        again = step()
    assert torch.equal(again, warmed_up)


def test_the_guard_itself_finds_what_asks_the_host() -> None:
    mask = torch.tensor([True, False])
    for asks in (lambda: mask.nonzero(), lambda: bool(mask.any()), lambda: torch.ones(2)[mask]):
        with pytest.raises(AssertionError), no_host():
            asks()
