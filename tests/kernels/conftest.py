"""Every kernel test runs on the PyTorch definitions and on the compiled CPU kernels."""

from __future__ import annotations

import pytest
from pariskv_kernels import cpu


@pytest.fixture(autouse=True, params=["naive", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation a CPU tensor meets."""
    if request.param == "numba" and not cpu.has_numba():
        pytest.skip("numba is not installed (extra [cpu])")
    monkeypatch.setattr(cpu, "has_numba", lambda: request.param == "numba")
    return str(request.param)
