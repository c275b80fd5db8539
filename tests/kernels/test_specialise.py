"""Templates: what becomes of loops, registers and branches, and under which name a kernel is kept."""

from __future__ import annotations

from typing import Any

import pytest
from pariskv_kernels import specialise
from pariskv_kernels.specialise import Template, static


def sums(out: Any, factor: Any) -> None:
    doubled = list(out)
    for i in static(N):  # noqa: F821
        word[i] = out[i] + doubled[0]  # noqa: F821
    for i in static(N):  # noqa: F821
        if i == 0:
            out[i] = word[i] * factor  # noqa: F821
        elif FLAG:  # noqa: F821
            out[i] = helper(word[i])  # noqa: F821
        else:
            out[i] = 0


def specialised(**constants: Any) -> Any:
    return Template(sums)._specialised("made", constants)


def test_loops_are_unrolled_registers_are_variables_and_arrays_stay() -> None:
    out = [1, 2, 3]
    specialised(N=3, FLAG=True, helper=lambda value: -value)(out, 10)
    assert out == [20, -3, -4]
    assert {"word_0", "word_1", "word_2"} <= set(specialised(N=3, FLAG=True).__code__.co_varnames)


def test_a_branch_that_a_constant_decides_is_gone() -> None:
    made = specialised(N=2, FLAG=False)
    out = [1, 2]
    made(out, 1)
    assert out == [2, 0]
    assert "helper" not in made.__code__.co_names


def test_the_function_keeps_its_file_and_line() -> None:
    made = specialised(N=1, FLAG=False)
    assert made.__code__.co_filename == __file__
    assert made.__code__.co_firstlineno == sums.__code__.co_firstlineno


def test_a_kernels_name_changes_with_its_constants_and_with_any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's cache knows a kernel by its name and its own file; a device function lies in another."""
    names = {specialise._name("kernel", labels) for labels in (["N1"], ["N2"], ["N1", "X" * 300], ["N1", "X" * 299])}
    assert len(names) == 4
    assert max(map(len, names)) <= specialise.LONGEST_NAME + 13
    monkeypatch.setattr(specialise, "_sources", lambda: b"edited")
    assert specialise._name("kernel", ["N1"]) not in names
