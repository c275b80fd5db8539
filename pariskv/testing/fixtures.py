"""Fixtures for the tests of plugins: pytest finds them wherever pariskv is installed (entry point `pytest11`).

tiny_runs         a tiny Llama that generates by a configuration, beside dense attention; made once
tiny_models       a function: a tiny random model of a family, such as "qwen3"; their names: `pariskv.integrations.tiny`
key_distribution  each kind of keys and queries in turn, for `check_retriever` and `sample_prompt`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pariskv.testing import DISTRIBUTIONS, Distribution, TinyRuns


@pytest.fixture(scope="session")
def tiny_runs() -> TinyRuns:
    """A tiny Llama that generates by a configuration, beside dense attention."""
    return TinyRuns()


@pytest.fixture
def tiny_models() -> Callable[..., Any]:
    """Makes a tiny random transformers model of a family, such as "qwen3"."""
    from pariskv.integrations.tiny import tiny_model

    return tiny_model


@pytest.fixture(params=DISTRIBUTIONS)
def key_distribution(request: pytest.FixtureRequest) -> Distribution:
    """Each kind of keys and queries in turn."""
    kind: Distribution = request.param
    return kind
