"""The store in host memory: on a CPU with a driver that only copies, on a GPU against `resident`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels import memory
from pariskv_kernels.driver import DriverError
from pariskv_kernels.memory import HostBuffer
from pariskv_plugins import uva as module
from pariskv_plugins.resident import Resident
from pariskv_plugins.uva import Options, Uva, UvaStore, token_bytes
from torch import Tensor

from pariskv import parse_config
from pariskv.errors import BindingError, CapacityError, ConfigError, ShapeError
from pariskv.registry import Registry
from pariskv.testing import check_retriever
from pariskv.types import LayerInfo, Selected, Selection, Store
from tests.plugins.uva_of_a_cpu import CopyingDriver, StraightLane, UvaOfACpu

LAYER = LayerInfo(3, 2, 3, 2, 64, torch.float32, torch.device("cpu"), 0.125)
REUSE = Options(reuse=True)

pytestmark = pytest.mark.usefixtures("huge_pages")


def store_of(retriever: Uva, layer: LayerInfo = LAYER, capacity: int = 10) -> UvaStore:
    return cast(UvaStore, retriever.allocate_store(layer, capacity))


def block(layer: LayerInfo, rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + tokens)
    both = torch.randn(2, rows, layer.kv_heads, tokens, layer.head_dim, generator=generator)
    keys, values = both.to(layer.device, layer.dtype)
    return keys, values


def filled(layer: LayerInfo, retriever: Uva, tokens: int, seed: int = 0) -> UvaStore:
    store = store_of(retriever, layer, tokens)
    retriever.update(*block(layer, layer.batch, tokens, seed), store, list(range(layer.batch)))
    return store


@pytest.mark.parametrize("options", [REUSE, Options(sort=True), Options(reuse=True, sort=True)])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16), (256, torch.float16)])
def test_it_keeps_the_contract_with_every_option(dim: int, dtype: torch.dtype, options: Options) -> None:
    check_retriever(UvaOfACpu(options), head_dim=dim, dtype=dtype)


def test_a_layer_on_a_cpu_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigError, match=r"layer 3: store uva .* is on cpu; write `store: resident`"):
        Uva().allocate_store(LAYER, 10)


def test_it_comes_with_pariskv_and_its_options_are_checked() -> None:
    registry = Registry.load(entry_points=False)
    made = registry.make("uva", {"reuse": True}, "uva")
    assert cast(Uva, made).options == REUSE
    with pytest.raises(ConfigError, match="reuse"):
        registry.make("uva", {"resue": True}, "uva")
    assert parse_config({"store": "uva"}).store == "uva"


def test_too_little_memory_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(UvaOfACpu())
    monkeypatch.setattr(memory, "tightest_limit", lambda: (1000, "a test"))
    with pytest.raises(CapacityError, match=r"layer 3: host memory: .* were asked for, .* \(a test\)"):
        store.grow(50)
    assert store.capacity == 10

    def no_memory(*arguments: Any, **named: Any) -> HostBuffer:
        raise MemoryError("host memory: none")

    monkeypatch.setattr(module, "HostBuffer", no_memory)
    with pytest.raises(CapacityError, match="layer 3: host memory: none"):
        Uva().allocate_store(replace(LAYER, device=torch.device("cuda")), 10)


def test_the_heads_of_a_token_lie_side_by_side() -> None:
    store = filled(LAYER, UvaOfACpu(), 10)
    assert tuple(store.rows.shape) == (2, 3, 10, 2, 64)
    assert store.rows.stride() == (3 * 2 * 64, 2 * 64, 2 * 3 * 2 * 64, 64, 1)
    keys, values = block(LAYER, 2, 10)
    assert torch.equal(store.rows, torch.stack((keys, values), dim=3))
    assert store.host_bytes >= 10 * token_bytes(LAYER)
    assert store.device_bytes == 16


def test_rows_are_appended_where_each_batch_row_ends() -> None:
    retriever = UvaOfACpu()
    store = store_of(retriever)
    first, second = block(LAYER, 1, 4), block(LAYER, 2, 3)
    retriever.update(*first, store, [1])
    retriever.update(*second, store, [1, 0])
    assert store.length == [3, 7]
    for got, one, two in zip(store.read(1, 2, 7), first, second, strict=True):
        assert torch.equal(got, torch.cat((one[0], two[0]), dim=1)[:, 2:])
    for got, two in zip(store.read(0, 0, 3), second, strict=True):
        assert torch.equal(got, two[1])


def test_a_full_store_takes_nothing_and_says_what_to_do() -> None:
    retriever = UvaOfACpu()
    store = store_of(retriever, capacity=5)
    retriever.update(*block(LAYER, 1, 4), store, [1])
    with pytest.raises(CapacityError, match="uva: row 1 holds 4 of 5 tokens, 2 more do not fit; call grow first"):
        retriever.update(*block(LAYER, 2, 2), store, [0, 1])
    assert store.length == [0, 4]
    with pytest.raises(
        ShapeError, match=r"uva: wanted keys and values \[2, 3, n, 64\] for 2 rows, got \[1, 3, 2, 64\]"
    ):
        retriever.update(*block(LAYER, 1, 2), store, [0, 1])
    with pytest.raises(BindingError, match=r"got a object, but .* take all three stages from one retriever"):
        retriever.fetch(Selection(torch.zeros(2, 3, 1, dtype=torch.int32)), cast(Store, object()), torch.zeros(1))


@pytest.mark.parametrize("batch", [1, 3])
def test_growth_keeps_the_rows_where_they_are(batch: int) -> None:
    layer, retriever = replace(LAYER, batch=batch), UvaOfACpu()
    store = filled(layer, retriever, 7)
    place, before = store.rows.data_ptr(), store.rows.clone()
    store.grow(5)
    assert store.capacity == 7
    for capacity in (8, 50):
        store.grow(capacity)
        assert (store.rows.data_ptr(), store.rows.shape[2]) == (place, capacity)
    assert torch.equal(store.rows[:, :, :7], before)
    keys, values = block(layer, batch, 43, seed=1)
    retriever.update(keys, values, store, list(range(batch)))
    assert len(list(store.buffer.spans(0, store.host_bytes))) > 1
    for got, new in zip(store.read(batch - 1, 0, 50), (keys, values), strict=True):
        assert torch.equal(got[:, 7:], new[batch - 1])


def test_a_large_block_is_staged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGING", 3 * token_bytes(LAYER) // 2)  # 3 tokens of one row
    store = filled(LAYER, UvaOfACpu(), 10)
    assert cast(CopyingDriver, store.buffer.driver).copies == 2 * 4
    keys, _ = block(LAYER, 2, 10)
    assert torch.equal(store.read(1, 1, 9)[0], keys[1, :, 1:9])


def test_reading_waits_for_what_is_on_its_way_and_so_does_every_update_of_a_decode() -> None:
    retriever = UvaOfACpu()
    store = filled(LAYER, retriever, 10)
    lane = cast(StraightLane, store.lane)
    assert (lane.pending, lane.settled) == (True, 0)
    store.read(0, 0, 2)
    assert (lane.pending, lane.settled) == (False, 1)
    store.grow(20)
    retriever.update(*block(LAYER, 1, 2), store, [0])
    assert lane.pending
    fetch(retriever, store, torch.tensor([0, 1]), new_slots(2))
    assert (lane.pending, lane.settled) == (False, 2)
    retriever.update(*block(LAYER, 1, 2), store, [0])
    assert (lane.pending, lane.settled) == (False, 3)


def new_slots(count: int) -> Tensor:
    return torch.full((2, 3, count, 2, 64), float("nan"))


def fetch(retriever: Uva, store: UvaStore, positions: Tensor, slots: Tensor) -> Selected:
    """The same positions in every head, with a bias that tells them apart."""
    indices = positions.int().expand(2, 3, -1)
    bias = positions.float().expand(2, 3, LAYER.group, -1)
    return retriever.fetch(Selection(indices, bias), store, slots)


def check(store: UvaStore, selected: Selected, slots: Tensor, positions: Tensor) -> None:
    """Every chosen row is in a slot, with its bias; the rest is zero."""
    assert selected.bias is not None
    wanted = sorted(positions[positions >= 0].tolist())
    for b, h in ((b, h) for b in range(2) for h in range(3)):
        valid = selected.valid[b, h]
        found = selected.bias[b, h, 0][valid].long()
        assert sorted(found.tolist()) == wanted
        assert torch.equal(slots[b, h][valid], store.rows[b, h, found])
        assert bool((slots[b, h][~valid] == 0).all())


def test_rows_of_the_step_before_do_not_cross_the_bus_again() -> None:
    retriever = UvaOfACpu(REUSE)
    store, slots = filled(LAYER, retriever, 20), new_slots(4)
    assert store.hit_rate == 0.0
    for step, positions in enumerate(([3, 5, 9, 12], [5, 9, 10, -1], [-1, 12, 10, 9], [-1] * 4)):
        if step == 1:
            store.rows[:, :, [5, 9]] += 1  # Not read again: the slots keep what they had.
            kept = slots[:, :, 1:3].clone()
        selected = fetch(retriever, store, torch.tensor(positions), slots)
        if step == 1:
            assert torch.equal(slots[:, :, 1:3], kept)
            store.rows[:, :, [5, 9]] = kept
        check(store, selected, slots, torch.tensor(positions))
    assert store.counts.tolist() == [6 * (0 + 2 + 2), 6 * (4 + 3 + 3)]
    assert store.hit_rate == 0.4


def test_other_slots_or_an_invalidation_forget_what_is_held() -> None:
    retriever, positions = UvaOfACpu(REUSE), torch.tensor([1, 4, 7])
    store, slots = filled(LAYER, retriever, 20), new_slots(3)
    fetch(retriever, store, positions, slots)
    slots = new_slots(3)
    check(store, fetch(retriever, store, positions, slots), slots, positions)
    assert store.hit_rate == 0.0
    slots.fill_(float("nan"))
    store.invalidate()
    check(store, fetch(retriever, store, positions, slots), slots, positions)
    assert store.hit_rate == 0.0
    # The same memory in another shape: a different number of selected rows.
    check(store, fetch(retriever, store, positions[:2], slots[:, :, :2]), slots[:, :, :2], positions[:2])
    assert store.hit_rate == 0.0


def test_too_many_slots_for_reuse_are_refused_with_what_to_change() -> None:
    layer, retriever = replace(LAYER, batch=1, kv_heads=1, head_dim=2), UvaOfACpu(REUSE)
    selection = Selection(torch.full((1, 1, 4097), -1, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"up to 4096 selected rows per head, got 4097; lower top_k or set reuse"):
        retriever.fetch(selection, store_of(retriever, layer), torch.zeros(1, 1, 4097, 2, 2))


def test_sorting_puts_positions_in_order_and_their_bias_with_them() -> None:
    retriever = UvaOfACpu(Options(sort=True))
    store, slots, positions = filled(LAYER, retriever, 20), new_slots(4), torch.tensor([9, -1, 3, 5])
    selected = fetch(retriever, store, positions, slots)
    check(store, selected, slots, positions)
    assert selected.valid[0, 0].tolist() == [True, True, True, False]
    assert selected.bias is not None
    assert selected.bias[0, 0, 0, :3].tolist() == [3, 5, 9]


@needs_gpu
class TestOnADevice:
    """The real thing against `resident`."""

    layer = LayerInfo(0, 3, 8, 4, 128, torch.bfloat16, torch.device("cuda"), 0.1)

    @pytest.mark.parametrize("options", [Options(), REUSE, Options(sort=True)])
    @pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16), (128, torch.float16)])
    def test_it_keeps_the_contract(self, dim: int, dtype: torch.dtype, options: Options) -> None:
        check_retriever(Uva(options), head_dim=dim, dtype=dtype, device="cuda")

    @pytest.mark.parametrize("options", [Options(), REUSE])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_it_holds_and_fetches_what_resident_does(self, batch: int, options: Options) -> None:
        layer = replace(self.layer, batch=batch)
        uva, resident = Uva(options), Resident()
        stores = [one.allocate_store(layer, 3000) for one in (uva, resident)]
        for seed, (tokens, rows) in enumerate([(2000, range(batch)), (777, [batch - 1]), (1000, range(batch))]):
            keys, values = block(layer, len(rows), tokens, seed)
            for one, store in zip((uva, resident), stores, strict=True):
                store.grow(max(store.capacity, 2000 * (seed + 1)))
                one.update(keys, values, store, list(rows))
            del keys, values
        for row in range(batch):
            stop = stores[0].length[row]
            for ours, theirs in zip(stores[0].read(row, 5, stop), stores[1].read(row, 5, stop), strict=True):
                assert torch.equal(ours, theirs)
        slots = torch.full((2, batch, 8, 2, 300, 128), float("nan"), device="cuda", dtype=layer.dtype).transpose(3, 4)
        for seed in range(3):
            indices = torch.rand(batch, 8, 3000, device="cuda").argsort(-1)[..., :300].sort(-1).values.int()
            indices[..., 250 + seed :] = -1
            bias = indices.float().unsqueeze(2).expand(-1, -1, 4, -1)
            got, wanted = (
                one.fetch(Selection(indices, bias), store, slots[i])
                for i, (one, store) in enumerate(zip((uva, resident), stores, strict=True))
            )
            assert got.bias is not None
            assert wanted.bias is not None
            for b, h in ((b, h) for b in range(batch) for h in range(8)):
                order = got.bias[b, h, 0][got.valid[b, h]].argsort()
                assert torch.equal(slots[0, b, h][got.valid[b, h]][order], slots[1, b, h][wanted.valid[b, h]])

    def test_blocks_leave_while_the_device_works_and_their_memory_is_kept(self) -> None:
        uva = Uva()
        store = store_of(uva, self.layer, 40_000)
        busy = torch.randn(8192, 8192, device="cuda")
        wanted = []
        for seed in range(4):
            keys, values = block(self.layer, 3, 10_000, seed)
            wanted.append(keys[2, :, -1].cpu())
            uva.update(keys, values, store, [0, 1, 2])
            del keys, values
            for _ in range(3):
                busy = busy @ busy * 1e-4
            torch.full((3, 8, 10_000, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
        for seed, last in enumerate(wanted):
            end = 10_000 * (seed + 1)
            assert torch.equal(store.read(2, end - 1, end)[0][:, 0].cpu(), last)

    def test_a_byte_offset_past_32_bits(self) -> None:
        layer = replace(self.layer, batch=1)
        uva, capacity = Uva(), (1 << 32) // token_bytes(replace(self.layer, batch=1)) + 5000
        store = store_of(uva, layer, capacity)
        store.length[0] = capacity - 1000
        keys, values = block(layer, 1, 1000)
        uva.update(keys, values, store, [0])
        for got, new in zip(store.read(0, capacity - 1000, capacity), (keys, values), strict=True):
            assert torch.equal(got, new[0])
        indices = (capacity - 1 - torch.arange(500, device="cuda").flip(0)).int().expand(1, 8, -1)
        slots = torch.zeros(1, 8, 500, 2, 128, device="cuda", dtype=layer.dtype)
        uva.fetch(Selection(indices.contiguous()), store, slots)
        assert torch.equal(slots, torch.stack((keys, values), dim=3)[:, :, 500:])

    def test_a_captured_fetch_reuses_rows_and_sees_what_is_appended_between_replays(self) -> None:
        uva = Uva(REUSE)
        store = store_of(uva, self.layer, 4000)
        keys, values = block(self.layer, 3, 2000)
        uva.update(keys, values, store, [0, 1, 2])
        slots = torch.zeros(3, 8, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
        indices = torch.arange(64, device="cuda", dtype=torch.int32).expand(3, 8, -1).contiguous()
        uva.fetch(Selection(indices), store, slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            uva.fetch(Selection(indices), store, slots)
        graph.replay()
        assert store.counts.tolist() == [64 * 24, 2 * 64 * 24]
        more = block(self.layer, 3, 500, seed=1)
        uva.update(*more, store, [0, 1, 2])
        indices.copy_(torch.arange(2000, 2064, device="cuda", dtype=torch.int32))
        graph.replay()
        assert torch.equal(slots, torch.stack(more, dim=3)[:, :, :64])
        assert store.hit_rate == pytest.approx(1 / 3)

    def test_a_capture_before_the_rows_have_arrived_is_refused(self) -> None:
        uva = Uva()
        store = filled(self.layer, uva, 1000)
        slots = torch.zeros(3, 8, 4, 2, 128, device="cuda", dtype=torch.bfloat16)
        indices = torch.zeros(3, 8, 4, device="cuda", dtype=torch.int32)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            slots.zero_()  # An empty capture would warn.
            with pytest.raises(BindingError, match="rows are still on their way"):
                uva.fetch(Selection(indices), store, slots)

    def test_the_memory_is_given_back_with_the_store(self) -> None:
        store = filled(self.layer, Uva(), 1000)
        driver, address = store.buffer.driver, store.buffer.cpu((1,), torch.uint8).data_ptr()
        assert driver.device_address(address)
        del store
        with pytest.raises(DriverError):
            driver.device_address(address)
