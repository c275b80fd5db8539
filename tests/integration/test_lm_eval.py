"""The adapter to lm-evaluation-harness: generation through the retriever, likelihoods refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pariskv.config import parse_config
from pariskv.errors import CapacityError, ConfigError
from pariskv.session import Session
from tests.integration.test_eval_tasks import YAML

pytest.importorskip("lm_eval.api.model", reason="lm-eval is not installed: pip install 'pariskv[eval]'")

from lm_eval.api.instance import Instance

from pariskv.integrations.lm_eval import ParisLM, cut_before

CONTEXTS = ("w1 w2 w3 " * 20, "w4 w5", "w6 " * 30)


@pytest.fixture
def session(folder: Path) -> Session:
    return Session.load(parse_config(YAML.format(folder=folder)))


def request(context: str, **settings: Any) -> Instance:
    return Instance("generate_until", {}, (context, {"max_gen_toks": 6, **settings}), 0, ("made up", 0, 1))


def test_requests_are_answered_as_a_session_answers_them(session: Session) -> None:
    wanted = [Session(session.model, parse_config(YAML.format(folder=session.config.model.name),
              ["generation.max_new_tokens=6"])).generate([context])[0] for context in CONTEXTS]  # fmt: skip
    for batch in (1, 2):
        assert ParisLM(session, batch).generate_until([request(context) for context in CONTEXTS]) == wanted


def test_an_answer_ends_before_its_stop_text(session: Session) -> None:
    (whole,) = ParisLM(session).generate_until([request(CONTEXTS[0])])
    stop = whole.split()[3]
    (cut,) = ParisLM(session).generate_until([request(CONTEXTS[0], until=[stop, "never"])])
    assert cut == whole[: whole.index(stop)]
    assert cut_before("abc", []) == "abc"


def test_likelihoods_and_what_does_not_fit_are_refused(session: Session) -> None:
    model = ParisLM(session)
    with pytest.raises(ConfigError, match="nothing is decoded and no retriever runs"):
        model.loglikelihood([])
    with pytest.raises(ConfigError, match="nothing is decoded"):
        model.loglikelihood_rolling([])
    with pytest.raises(ConfigError, match="the task wants num_beams of its generation"):
        model.generate_until([request("w1", num_beams=4)])
    with pytest.raises(CapacityError, match="the model's context is 512"):
        model.generate_until([request("w1 " * 510)])
