"""An environment with the built wheel of pariskv, made once."""

from __future__ import annotations

import pytest

from tests.packaging.fresh import ROOT, Environment, build_wheel, new_environment


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment, away from the checkout, with pariskv in it."""
    environment = new_environment(tmp_path_factory.mktemp("installed"))
    environment.install(build_wheel(ROOT, environment.folder / "wheels"))
    return environment
