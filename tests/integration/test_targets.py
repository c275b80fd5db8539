"""Loose pins of what docs/metrics.md says of the default retriever, on the default model and short texts.

The budgets are those of the page as shares of the prompt: 1,500 tokens here, 7,500 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pariskv import texts
from pariskv.config import load_config
from pariskv.evaluation.fidelity import measure_fidelity
from pariskv.integrations import transformers
from pariskv.integrations.calibrate import calibrate
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model

CONFIG = Path(__file__).parents[2] / "configs/smollm2.yaml"
TOKENS, STEPS = 1500, 4
TEXTS = {"prose": "prose-1", "source": "source-1"}

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        local_path(resolve_model(DEFAULT_MODEL)) is None, reason=f"run: pariskv model fetch {DEFAULT_MODEL}"
    ),
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.load(load_config(CONFIG))


def measured(
    model: LanguageModel, retriever: str, top_k: int, candidates: float, text: str = "source", **options: str
) -> Mapping[str, float]:
    """The summary of fidelity of a retriever, with options of its own."""
    given = [f"layers.default.retriever={retriever}", f"layers.default.top_k={top_k}", "window.dense_below=0"]
    given += [f"layers.default.candidates={candidates}"]
    given += [f"retrievers.{retriever}.{name}={value}" for name, value in options.items()]
    config = load_config(CONFIG, given)
    sample = {text: texts.STANDARD[TEXTS[text]]()}
    summary = measure_fidelity(model, config, sample, TOKENS, STEPS).summary()
    return {name: value for name, value in summary.items() if value is not None}


def test_most_of_the_candidates_are_fetched(model: LanguageModel) -> None:
    """Like 512 of 10 %, where the vote alone decides: 70 % of the candidates."""
    ours, papers = (measured(model, name, 102, 0.1) for name in ("pariskv", "pariskv-paper"))
    assert ours["mass_ratio"] > 0.85
    assert ours["mass_ratio"] > papers["mass_ratio"] + 0.1


def test_a_quarter_of_the_papers_candidates_is_enough(model: LanguageModel) -> None:
    ours, papers = measured(model, "pariskv", 20, 0.05), measured(model, "pariskv-paper", 20, 0.2)
    assert ours["mass_ratio"] >= papers["mass_ratio"]


def test_the_next_token_is_nearly_as_often_the_same_as_by_the_best_choice(model: LanguageModel) -> None:
    ours, best = measured(model, "pariskv", 26, 0.125), measured(model, "exact", 26, 0.125)
    assert ours["argmax_agreement"] >= best["argmax_agreement"] - 1 / STEPS
    assert ours["kl"] < best["kl"]  # it estimates what is not fetched, and the best choice of rows forgets it
    assert ours["kl"] < 0.5 * measured(model, "pariskv-paper", 26, 0.25)["kl"]


@pytest.mark.parametrize(("learnt_from", "text"), [("source", "prose"), ("prose", "source")])
def test_a_calibration_on_another_kind_of_text_serves(
    model: LanguageModel, learnt_from: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = measured(model, "pariskv", 20, 0.1, text, precondition="prompt")
    tables = calibrate(model, [texts.STANDARD[TEXTS[learnt_from]]()], 2000)
    monkeypatch.setattr(transformers, "find_calibration", lambda _: tables)
    of_another = measured(model, "pariskv", 20, 0.1, text, precondition="model")
    assert of_another["mass_ratio"] == pytest.approx(own["mass_ratio"], abs=0.01)
    assert of_another["mass_ratio"] != own["mass_ratio"]  # it was used
