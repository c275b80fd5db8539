"""Mixed requests, killed and resumed: nothing lost, doubled or mixed up, no memory kept. At length: `tests/soak.py`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from soak import soak


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mixed_requests_are_answered_as_by_themselves_across_a_kill(tmp_path: Path) -> None:
    found = soak(tmp_path, requests=40, longest=200, rows=2, most_new=9)
    assert found.wrong == []
    assert (found.answers, found.errors) == (38, 2)
    assert found.killed.code == -signal.SIGKILL
    assert found.resumed.code == 1, "some lines are bad"
    assert 15 <= found.kept < 40
    for ran in (found.killed, found.resumed):
        assert ran.end <= 1.05 * ran.begin
