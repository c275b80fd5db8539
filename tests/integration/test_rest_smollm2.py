"""`rest` on the real default model: what is not fetched is worth estimating. docs/metrics.md has the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest

from pariskv import texts
from pariskv.config import load_config
from pariskv.evaluation.fidelity import measure_fidelity
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model

CONFIG = Path(__file__).parents[2] / "configs/smollm2.yaml"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        local_path(resolve_model(DEFAULT_MODEL)) is None, reason=f"run: pariskv model fetch {DEFAULT_MODEL}"
    ),
]


def test_the_estimate_brings_the_next_token_nearer_to_dense_attention() -> None:
    kl = {}
    for rest in ("none", "gaussian"):
        given = ["window.dense_below=0", "layers.default.top_k=64", f"retrievers.pariskv.rest={rest}"]
        config = load_config(CONFIG, given)
        model = LanguageModel.load(config)
        kl[rest] = measure_fidelity(model, config, {"prose": texts.STANDARD["prose-1"]()}, 2000, 6).summary()["kl"]
    assert kl["none"] is not None
    assert kl["gaussian"] is not None
    assert kl["gaussian"] < 0.7 * kl["none"], kl
