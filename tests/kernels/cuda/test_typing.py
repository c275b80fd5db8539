"""Numba can type every kernel for a GPU, which the simulator does not ask: once a vote compiled on no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest_cuda import ON_GPU

SCRIPT = Path(__file__).with_name("type_kernels.py")


@pytest.mark.skipif(ON_GPU, reason="where there is a GPU, the kernels' own tests compile them")
@pytest.mark.timeout(900)
def test_every_kernel_has_types() -> None:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    count_votes" in done.stdout
