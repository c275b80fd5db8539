"""Host memory that the device shares: freed once, refused in time, grown in place."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels import available, memory
from pariskv_kernels.available import MACHINE, available_memory, tightest_limit
from pariskv_kernels.driver import DriverError, cuda_driver
from pariskv_kernels.memory import HostBuffer
from torch import Tensor

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
GB = 10**9


@pytest.fixture(autouse=True)
def backend() -> str:
    """Overrides the CPU backends of this folder: there is one allocator."""
    return "host"


class FakeDriver:
    """Remembers what was asked of it; `fails` names the calls that raise."""

    def __init__(self, same_addresses: bool = True, fails: tuple[str, ...] = ()):
        self.same_addresses = same_addresses
        self.fails = fails
        self.calls: list[tuple[str, int, int]] = []
        self.blocks: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def _note(self, name: str, address: int = 0, nbytes: int = 0) -> None:
        self.calls.append((name, address, nbytes))
        if name in self.fails:
            raise DriverError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY")

    def register(self, address: int, nbytes: int) -> None:
        self._note("register", address, nbytes)

    def unregister(self, address: int) -> None:
        self._note("unregister", address)

    def allocate(self, nbytes: int) -> int:
        self._note("allocate", 0, nbytes)
        block = ctypes.create_string_buffer(nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        self._note("free", address)
        del self.blocks[address]

    def device_address(self, address: int) -> int:
        self._note("device_address", address)
        return address

    def synchronize(self) -> None:
        self._note("synchronize")

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._note("copy")
        target.copy_(source)

    def named(self, name: str) -> list[tuple[int, int]]:
        return [(address, nbytes) for called, address, nbytes in self.calls if called == name]


def buffer(nbytes: int, driver: FakeDriver, unit: int = 1, headroom: int = 1) -> HostBuffer:
    return HostBuffer(nbytes, CPU, unit=unit, headroom=headroom, driver=driver)


@pytest.fixture
def huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's switch for huge pages, which may be off where the tests run."""
    switch = tmp_path / "enabled"
    switch.write_text("always [madvise] never\n")
    monkeypatch.setattr(memory, "HUGE_PAGES", switch)
    return switch


def test_the_same_bytes_are_a_tensor_of_any_type(huge_pages: Path) -> None:
    shared = buffer(1000, FakeDriver())
    assert shared.nbytes == PAGE
    shared.cpu((2, 5), torch.bfloat16).copy_(torch.arange(10.0).view(2, 5))
    assert shared.cpu((10,), torch.bfloat16).tolist() == list(range(10))
    assert shared.cpu((3,), torch.int16).tolist() == [0, 0x3F80, 0x4000]
    with pytest.raises(ValueError, match=r"^shape: \[5000\] of torch.uint8 are 5000 bytes, the buffer has 4096"):
        shared.cpu((5000,), torch.uint8)


def test_memory_is_registered_once_and_given_back_once(huge_pages: Path) -> None:
    driver = FakeDriver()
    shared = buffer(5 * PAGE, driver)
    [(address, nbytes)] = driver.named("register")
    assert (address % memory.HUGE_PAGE, nbytes) == (0, 5 * PAGE)
    kept = shared.cpu((4,), torch.int32)
    free = shared._memory.free
    del shared
    gc.collect()
    kept.fill_(7)  # A tensor keeps the memory.
    assert (kept.tolist(), driver.named("unregister")) == ([7] * 4, [])
    del kept
    gc.collect()
    free()
    assert driver.named("unregister") == [(address, 0)]
    assert [name for name, _, _ in driver.calls][-2:] == ["synchronize", "unregister"]


def test_an_exception_during_construction_gives_everything_back(
    huge_pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()

    def interrupted(address: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "device_address", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer(PAGE, driver)
    assert driver.named("unregister") == [(address, 0) for address, _ in driver.named("register")]
    assert len(driver.named("unregister")) == 1

    huge_pages.write_text("always madvise [never]\n")
    with pytest.raises(KeyboardInterrupt):
        buffer(PAGE, driver)
    assert (len(driver.named("free")), driver.blocks) == (1, {})


@pytest.mark.parametrize(
    ("switch", "fails", "why"),
    [
        ("always madvise [never]\n", (), r"huge pages are switched off \(.*: always madvise \[never\]\)"),
        (None, (), r"enabled cannot be read \(No such file or directory\)"),
        ("[always] madvise never\n", ("register",), "register: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_without_huge_pages_or_registration_the_driver_allocates_and_the_log_says_why(
    huge_pages: Path, caplog: pytest.LogCaptureFixture, switch: str | None, fails: tuple[str, ...], why: str
) -> None:
    if switch is None:
        huge_pages.unlink()
    else:
        huge_pages.write_text(switch)
    driver = FakeDriver(fails=fails)
    shared = buffer(1000, driver)
    shared.cpu((1000,), torch.uint8).fill_(3)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(f"0.000 GB by cuMemHostAlloc, the slow way, because .*{why}", record.getMessage())
    assert driver.named("unregister") == []
    address = shared._memory.address
    del shared
    gc.collect()
    assert driver.named("free") == [(address, 0)]


def test_a_driver_without_memory_is_a_memory_error(huge_pages: Path) -> None:
    with pytest.raises(MemoryError, match=r"the driver has no 0.000 GB \(allocate: CUDA_ERROR_OUT_OF_MEMORY\)"):
        buffer(1000, FakeDriver(fails=("register", "allocate")))


def test_what_exceeds_the_memory_is_refused_before_anything_is_allocated(
    huge_pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(memory, "tightest_limit", lambda: (3 * GB, "memory.max of cgroup /x"))
    asked = r"host memory: 5.000 GB were asked for, 3.000 GB are available \(memory.max of cgroup /x\)"
    with pytest.raises(MemoryError, match=asked):
        buffer(5 * GB, driver)
    assert driver.calls == []
    shared = buffer(PAGE, driver, headroom=10**7)
    with pytest.raises(MemoryError, match=asked):
        shared.grow(5 * GB)
    assert (shared.nbytes, len(driver.named("register"))) == (PAGE, 1)


def test_growth_adds_an_extent_and_copies_nothing(huge_pages: Path) -> None:
    driver = FakeDriver()
    shared = buffer(3 * PAGE, driver, headroom=4)
    before = shared.cpu((3 * PAGE,), torch.uint8)
    shared.grow(2 * PAGE)
    assert shared.nbytes == 3 * PAGE
    shared.grow(3 * PAGE + 1)
    shared.grow(9 * PAGE)
    first = shared._memory.address
    assert driver.named("register") == [(first, 3 * PAGE), (first + 3 * PAGE, PAGE), (first + 4 * PAGE, 5 * PAGE)]
    after = shared.cpu((9 * PAGE,), torch.uint8)
    before.fill_(5)
    assert after.data_ptr() == before.data_ptr()
    assert after[3 * PAGE - 1] == 5
    after.fill_(6)
    assert list(shared.spans(10, 9 * PAGE)) == [
        (10, 3 * PAGE),
        (3 * PAGE, 4 * PAGE),
        (4 * PAGE, 9 * PAGE),
    ]
    assert list(shared.spans(4 * PAGE, 4 * PAGE + 1)) == [(4 * PAGE, 4 * PAGE + 1)]
    assert list(shared.spans(5, 5)) == []
    del shared, before, after
    gc.collect()
    assert driver.named("unregister") == [(first + start * PAGE, 0) for start in (0, 3, 4)]


def test_no_extent_cuts_through_a_unit(huge_pages: Path) -> None:
    shared = buffer(100, FakeDriver(), unit=3 * 512, headroom=100)
    for nbytes in (5000, 5001, 20_000):
        shared.grow(nbytes)
        assert shared.nbytes >= nbytes
    assert all(end % (3 * 512) == 0 and end % PAGE == 0 for _, end in shared.spans(0, shared.nbytes))
    assert len(list(shared.spans(0, shared.nbytes))) > 1


@pytest.mark.parametrize(
    ("driver", "headroom", "why"),
    [
        (FakeDriver(), 1, "address space was reserved for 0.000 GB"),
        (FakeDriver(same_addresses=False), 8, "this device finds registered memory at addresses of its own"),
        (FakeDriver(fails=("register",)), 8, "memory of cuMemHostAlloc has one size"),
    ],
)
def test_growth_that_has_to_copy_says_so_and_frees_the_old_memory(
    huge_pages: Path, caplog: pytest.LogCaptureFixture, driver: FakeDriver, headroom: int, why: str
) -> None:
    shared = buffer(PAGE, driver, headroom=headroom)
    caplog.clear()
    shared.cpu((PAGE,), torch.uint8).copy_(torch.arange(PAGE) % 251)
    shared.grow(2 * PAGE)
    assert f"growing to 0.000 GB by copying, because {why}" in caplog.text
    assert torch.equal(shared.cpu((PAGE,), torch.uint8), (torch.arange(PAGE) % 251).byte())
    assert shared.cpu((2 * PAGE,), torch.uint8).numel() == 2 * PAGE
    gc.collect()
    assert len(driver.named("unregister")) + len(driver.named("free")) == 1
    del shared
    gc.collect()
    assert len(driver.named("unregister")) + len(driver.named("free")) == 2


def test_an_extent_that_cannot_be_registered_is_copied_to_memory_of_the_driver(
    huge_pages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    shared = buffer(PAGE, driver, headroom=4)
    shared.cpu((PAGE,), torch.uint8).fill_(9)
    driver.fails = ("register",)
    shared.grow(2 * PAGE)
    assert "by copying, because register: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert bool((shared.cpu((PAGE,), torch.uint8) == 9).all())
    gc.collect()
    assert len(driver.named("unregister")) == 1
    assert len(driver.blocks) == 1


def machine(root: Path, total: int = 64, free: int = 32, cgroup: str = "0::/a/b\n") -> Path:
    """A machine's files: sizes in GiB."""
    (root / "proc/self").mkdir(parents=True)
    lines = (f"MemTotal: {total << 20} kB", "MemFree: 1 kB", f"MemAvailable: {free << 20} kB", "HugePages_Total: 0")
    (root / "proc/meminfo").write_text("\n".join(lines))
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(folder: Path, limit: int | str, used: int, droppable: int = 0, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit << 30 if isinstance(limit, int) else limit}\n")
    (folder / names[1]).write_text(f"{used << 30}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if v1 else ''}inactive_file {droppable << 30}\n")


def gibibytes(root: Path) -> float:
    return tightest_limit(root)[0] / 2**30


def test_the_machine_alone_sets_the_limit_where_there_are_no_groups(tmp_path: Path) -> None:
    assert tightest_limit(machine(tmp_path)) == (32 << 30, "MemAvailable of this machine")
    assert tightest_limit(tmp_path / "elsewhere")[0] == sys.maxsize


@pytest.mark.parametrize("place", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_every_group_above_counts(tmp_path: Path, place: str) -> None:
    base = machine(tmp_path) / place
    group(base / "a/b", "max", 3)
    group(base / "a", 12, 7, droppable=2)
    assert tightest_limit(tmp_path) == (7 << 30, f"memory.max of cgroup {base / 'a'}")
    group(base / "a/b", 4, 3)
    assert gibibytes(tmp_path) == 1
    group(base, 8, 9)  # A container's own group, seen as the root.
    assert gibibytes(tmp_path) == 0


def test_groups_of_version_1_count(tmp_path: Path) -> None:
    base = machine(tmp_path, cgroup="3:cpuset:/\n4:memory,hugetlb:/pod/box\n0::/\n") / "sys/fs/cgroup/memory"
    group(base, str(2**63 - 4096), 20, v1=True)
    group(base / "pod", 10, 6, droppable=1, v1=True)
    assert gibibytes(tmp_path) == 5
    group(base / "pod/box", 4, 2, v1=True)
    assert gibibytes(tmp_path) == 2


def test_a_path_that_leads_out_of_the_namespace_is_not_followed(tmp_path: Path) -> None:
    base = machine(tmp_path, cgroup="0::/../other\n") / "sys/fs/cgroup"
    group(base, 16, 6)
    group(base / "../other", 1, 1)
    assert gibibytes(tmp_path) == 10


def test_a_machine_that_grows_has_what_it_is_said_to_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, total=64, free=60)
    monkeypatch.setenv(MACHINE, str(128 << 30))
    assert tightest_limit(tmp_path) == (124 << 30, MACHINE)
    monkeypatch.setenv(MACHINE, "128GB")
    with pytest.raises(ValueError, match=f"{MACHINE}='128GB': wanted the machine's memory in bytes, a whole number"):
        tightest_limit(tmp_path)


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory() < 2**60
    assert available.tightest_limit()[1]


@needs_gpu
class TestOnADevice:
    """The real driver."""

    device = torch.device("cuda")

    def test_bytes_are_shared_both_ways(self) -> None:
        shared = HostBuffer(10_000_000, self.device)
        host, device = shared.cpu((1000, 1000), torch.bfloat16), shared.device((1000, 1000), torch.bfloat16)
        host.copy_(torch.randn(1000, 1000))
        assert device.device.type == "cuda"
        assert torch.equal((device * 2).cpu(), host * 2)
        device.mul_(-1)
        torch.cuda.synchronize()
        assert torch.equal((device + 0).cpu(), host)

    def test_it_is_registered_memory_of_one_address(self) -> None:
        shared = HostBuffer(1 << 22, self.device, headroom=4)
        assert isinstance(shared._memory, memory._Mapped), "huge pages are off on this machine"
        assert shared.cpu((8,), torch.uint8).is_pinned()
        before = shared.device((1 << 22,), torch.uint8)
        shared.grow(1 << 24)
        after = shared.device((1 << 24,), torch.uint8)
        assert (after.data_ptr(), len(list(shared.spans(0, shared.nbytes)))) == (before.data_ptr(), 2)
        after.fill_(7)
        torch.cuda.synchronize()
        assert int(shared.cpu((1 << 24,), torch.uint8).sum()) == 7 << 24

    @pytest.mark.parametrize("lines", [1, 5])
    def test_the_copy_engine_copies_lines_with_gaps(self, lines: int) -> None:
        driver = cuda_driver(self.device)
        host = HostBuffer(1 << 20, self.device).cpu((64, lines, 32), torch.float16)
        host.fill_(-1)
        source = torch.randn(64, 32, device="cuda").half()
        driver.copy(source, host[:, lines - 1])
        back = torch.zeros(64, 32, device="cuda", dtype=torch.float16)
        driver.copy(host[:, lines - 1], back)
        assert torch.equal(back, source)
        assert torch.equal(host[:, lines - 1], source.cpu())
        assert bool((host[:, : lines - 1] == -1).all())

    def test_nothing_stays_registered(self) -> None:
        shared = HostBuffer(1 << 22, self.device, headroom=2)
        shared.grow(1 << 23)
        driver, address = shared.driver, shared._memory.address
        kept = shared.device((4,), torch.int32)
        del shared
        gc.collect()
        assert driver.device_address(address)
        del kept
        gc.collect()
        for start in (0, 1 << 22):
            with pytest.raises(DriverError, match="cuMemHostGetDevicePointer"):
                driver.device_address(address + start)

    def test_the_fallback_works(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "enabled").write_text("always madvise [never]")
        monkeypatch.setattr(memory, "HUGE_PAGES", tmp_path / "enabled")
        shared = HostBuffer(1 << 20, self.device)
        shared.cpu((1 << 20,), torch.uint8).fill_(5)
        assert int(shared.device((1 << 20,), torch.uint8).sum()) == 5 << 20
        shared.grow(1 << 21)
        assert int(shared.device((1 << 20,), torch.uint8).sum()) == 5 << 20
