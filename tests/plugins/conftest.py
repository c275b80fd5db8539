"""Settings of the plugins' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest_cuda import ON_GPU
from pariskv_kernels import memory


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The tensors are small, and threads of busy machines wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def huge_pages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be off where these tests run; nothing here depends on their being there."""
    if not ON_GPU:
        switch = tmp_path_factory.mktemp("sys") / "enabled"
        switch.write_text("[madvise]")
        monkeypatch.setattr(memory, "HUGE_PAGES", switch)
