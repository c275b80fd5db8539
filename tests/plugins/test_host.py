"""The store whose rows the CPU gathers: on a CPU against `resident`, on a GPU against the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_plugins import host as module
from pariskv_plugins.host import Host, HostStore
from pariskv_plugins.resident import Resident
from tiny_models import prompt, tiny_model
from torch import Tensor

from pariskv import parse_config
from pariskv.binding import bind
from pariskv.errors import BindingError, CapacityError, ShapeError
from pariskv.registry import Registry
from pariskv.stages import stages_of, traits_of
from pariskv.testing import check_retriever
from pariskv.types import LayerInfo, Selection, Store
from tests.plugins.driving import config_of, generated, padded

LAYER = LayerInfo(3, 2, 3, 2, 64, torch.float32, torch.device("cpu"), 0.125)


def block(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, rows, 3, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    return keys, values


def store_of(capacity: int, layer: LayerInfo = LAYER) -> HostStore:
    return cast(HostStore, Host().allocate_store(layer, capacity))


def test_it_keeps_the_contract_with_wide_heads_in_float16() -> None:
    check_retriever(Host(), head_dim=256, dtype=torch.float16)


@needs_gpu
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16), (256, torch.float16)])
def test_it_keeps_the_contract_beside_a_gpu(dim: int, dtype: torch.dtype) -> None:
    check_retriever(Host(), head_dim=dim, dtype=dtype, device="cuda")


def test_it_brings_three_stages_and_says_what_it_is() -> None:
    traits = traits_of(Host(), stages_of(Host(), "host"), "host")
    assert list(stages_of(Host(), "host")) == ["allocate_store", "fetch", "update"]
    assert (traits.host_resident, traits.graph_safe) == (True, False)
    pipeline = bind(parse_config({"store": "host"}), 1, Registry.load(entry_points=False))[0]
    assert pipeline.host_resident
    assert pipeline.graph_reason.startswith("fetch of retriever 'host'")


def test_ragged_rows_that_grow_are_fetched_like_residents() -> None:
    stores: list[tuple[Any, Store]] = [(one, one.allocate_store(LAYER, 8)) for one in (Host(), Resident())]
    indices = torch.tensor([[[6, -1, 0, 9], [-1, -1, 3, 2], [11, 5, -1, 1]], [[1, -1, -1, 0]] * 3], dtype=torch.int32)
    bias = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for retriever, store in stores:
        retriever.update(*block(1, 7), store, [0])
        retriever.update(*block(1, 2), store, [1])
        store.grow(12)
        retriever.update(*block(1, 5), store, [0])
        slots = torch.full((2, 3, 2, 6, 64), float("nan")).transpose(2, 3)[:, :, 1:5]
        selected = retriever.fetch(Selection(indices, bias), store, slots)
        assert selected.bias is bias
        assert torch.equal(selected.valid, indices >= 0)
        found.append(slots[selected.valid])
    assert torch.equal(*found)
    assert not found[0].isnan().any()
    keys, values = (torch.cat((one[0], two[0]), dim=1) for one, two in zip(block(1, 7), block(1, 5), strict=True))
    assert torch.equal(found[0][0], torch.stack((keys[0, 6], values[0, 6])))


def test_growing_to_less_keeps_everything() -> None:
    store = store_of(5)
    store.grow(3)
    assert store.capacity == 5


def test_rows_are_host_bytes_wherever_the_layer_is() -> None:
    store = store_of(10)
    assert (store.host_bytes, store.device_bytes) == (2 * 3 * 10 * 2 * 64 * 4, 0)


def test_a_full_store_takes_nothing_and_a_wrong_block_is_refused() -> None:
    host, store = Host(), store_of(5)
    host.update(*block(1, 4), store, [1])
    with pytest.raises(CapacityError, match="host: row 1 holds 4 of 5 tokens, 2 more do not fit; call grow first"):
        host.update(*block(2, 2), store, [0, 1])
    assert store.length == [0, 4]
    with pytest.raises(ShapeError, match=r"host: wanted keys and values \[2, 3, n, 64\] for 2 rows"):
        host.update(*block(1, 1), store, [0, 1])


def test_too_little_memory_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(5)
    monkeypatch.setattr(module, "tightest_limit", lambda: (100_000, "a test"))
    with pytest.raises(CapacityError, match=r"layer 3: store host needs 0\.154 GB, 0\.000 GB are available \(a test\)"):
        store.grow(50_000)
    assert store.capacity == 5


def test_another_retrievers_store_is_refused() -> None:
    selection = Selection(torch.zeros(2, 3, 1, dtype=torch.int32))
    with pytest.raises(BindingError, match=r"got a ResidentStore, but .* take all three stages from one retriever"):
        Host().fetch(selection, Resident().allocate_store(LAYER, 5), torch.zeros(2, 3, 1, 2, 64))


class Locking:
    """What is asked of the CUDA runtime, which notes what is locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return flags

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_pages_are_locked_beside_a_gpu_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Locking()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    store = store_of(5, replace(LAYER, device=torch.device("cuda")))
    store.append(*block(1, 4), [1])
    assert list(runtime.locked.values()) == [store.host_bytes]
    store.grow(9)
    assert list(runtime.locked.values()) == [store.host_bytes]
    assert torch.equal(store.rows[1, :, :4, 1], block(1, 4)[1][0])
    del store
    assert runtime.locked == {}


def test_pages_that_cannot_be_locked_are_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Locking)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(CapacityError, match=r"0\.000 GB of host memory cannot be page-locked \(out of memory\)"):
        store_of(5, replace(LAYER, device=torch.device("cuda")))


def test_a_batch_decodes_over_it_as_over_resident() -> None:
    model = tiny_model("llama")
    ids, mask = padded([prompt(60), prompt(41, seed=1)])
    config = config_of("pariskv", candidates=0.5, top_k=6)
    tokens = [generated(model, ids, replace(config, store=store), 20, mask)[0] for store in ("host", "resident")]
    assert torch.equal(*tokens)
