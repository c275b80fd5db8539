"""The store on the layer's device, and the layer that needs none."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from pariskv_plugins.dense import Dense
from pariskv_plugins.resident import Resident

from pariskv.errors import BindingError, CapacityError, ShapeError
from pariskv.stages import stages_of
from pariskv.testing import check_retriever
from pariskv.types import LayerInfo, Selection, Store

LAYER = LayerInfo(0, 2, 3, 2, 64, torch.float32, torch.device("cpu"), 0.125)


def block(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, rows, 3, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    return keys, values


def test_it_keeps_the_contract_with_wide_heads_in_float16() -> None:
    check_retriever(Resident(), head_dim=256, dtype=torch.float16)


def test_rows_of_a_cpu_are_host_bytes() -> None:
    store = Resident().allocate_store(LAYER, 10)
    assert (store.host_bytes, store.device_bytes) == (2 * 3 * 10 * 2 * 64 * 4, 0)
    store.grow(20)
    assert store.host_bytes == 2 * 3 * 20 * 2 * 64 * 4


def test_rows_are_appended_where_each_batch_row_ends() -> None:
    resident = Resident()
    store = resident.allocate_store(LAYER, 10)
    first, second = block(1, 4), block(2, 3)
    resident.update(*first, store, [1])
    resident.update(*second, store, [1, 0])
    assert store.length == [3, 7]
    for got, one, two in zip(store.read(1, 0, 7), first, second, strict=True):
        assert torch.equal(got, torch.cat((one[0], two[0]), dim=1))
    for got, two in zip(store.read(0, 0, 3), second, strict=True):
        assert torch.equal(got, two[1])


def test_a_full_store_takes_nothing_and_says_what_to_do() -> None:
    resident = Resident()
    store = resident.allocate_store(LAYER, 5)
    resident.update(*block(1, 4), store, [1])
    with pytest.raises(CapacityError, match="row 1 holds 4 of 5 tokens, 2 more do not fit; call grow first"):
        resident.update(*block(2, 2), store, [0, 1])
    assert store.length == [0, 4]
    store.grow(6)
    resident.update(*block(2, 2), store, [0, 1])
    assert store.length == [2, 6]


def test_growing_to_less_keeps_everything() -> None:
    store = Resident().allocate_store(LAYER, 5)
    store.grow(3)
    assert store.capacity == 5


def test_a_block_of_the_wrong_shape_is_refused() -> None:
    resident = Resident()
    store = resident.allocate_store(LAYER, 5)
    keys, values = block(1, 2)
    with pytest.raises(ShapeError, match=r"wanted keys and values \[2, 3, n, 64\] for 2 rows, got \[1, 3, 2, 64\]"):
        resident.update(keys, values, store, [0, 1])
    with pytest.raises(ShapeError, match=r"got \[1, 3, 2, 64\] and \[1, 3, 1, 64\]"):
        resident.update(keys, values[:, :, :1], store, [0])


def test_another_retrievers_store_is_refused() -> None:
    selection = Selection(torch.zeros(2, 3, 1, dtype=torch.int32))
    with pytest.raises(BindingError, match=r"got a object, but .* take all three stages from one retriever"):
        Resident().fetch(selection, cast(Store, object()), torch.zeros(2, 3, 1, 2, 64))


def test_dense_has_no_stage_and_indexes_nothing() -> None:
    assert stages_of(Dense(), "dense") == {}
    assert Dense.indexes == "none"
