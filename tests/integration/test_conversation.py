"""A conversation over one live cache: every answer as a fresh run gives it, and of a turn only what is new is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import fail_at
from pariskv_plugins.resident import ResidentStore
from tiny_models import tiny_model

import pariskv
from pariskv import Session, parse_config
from pariskv.conversation import Conversation, common_tokens
from pariskv.decode import generate
from pariskv.errors import CapacityError, ConfigError
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import LoadedModel
from pariskv.types import Store
from tests.docs.fences import blocks

WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
PLAIN = (
    "{% for m in messages %}{{ {'system': 'w3', 'user': 'w1', 'assistant': 'w2'}[m.role] }} {{ m.content }} w4 "
    "{% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
)
FORGETFUL = PLAIN.replace(
    "{{ m.content }}", "{{ m.content.split(' ')[-3:] | join(' ') if m.role == 'assistant' else m.content }}"
)
"""Of earlier answers it leaves the last words only, as templates do that take thinking back."""


def a_session(
    tiny: tuple[Any, Any], template: str | None = PLAIN, family: str = "llama", new: int = 20, **layer: object
) -> Session:
    values = {
        "layers": {"default": {"top_k": 4000, "candidates": 1.0, **layer}},
        "window": WINDOW,
        "generation": {"max_new_tokens": new},
        "runtime": {"check_memory": False},
    }
    _, tokenizer = tiny
    tokenizer.chat_template = template
    model = tiny_model(family, torch.float64, vocab_size=40)
    return Session(LanguageModel(LoadedModel(model, tokenizer, "tiny", 2000)), parse_config(values))


def said(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(5, 40)}" for _ in range(draw.randint(1, 30))) for _ in range(count)]


def fresh(session: Session, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens that a new cache gives for the whole conversation."""
    model, config = session.model, session.config
    batch = model.batch_of([model.render(messages)])
    steps = generate(model, model.new_cache(config), batch, config.generation)
    return [token for (token,) in steps if token is not None]


def check(chat: Conversation, text: str) -> None:
    """Ask, and compare with a fresh run."""
    before = [*chat.messages, {"role": "user", "content": text}]
    answer = chat.ask(text)
    assert chat.turn is not None
    assert chat.turn.tokens == fresh(chat.session, before)
    assert answer == chat.turn.text
    assert chat.messages == [*before, {"role": "assistant", "content": answer}]
    assert chat.turn.read + chat.turn.kept == len(chat.session.model.render(before))


@pytest.mark.parametrize("template", [PLAIN, FORGETFUL], ids=["plain", "forgetful"])
@pytest.mark.parametrize("retriever", ["pariskv", "exact", "dense"])
def test_every_turn_is_answered_as_by_a_fresh_run(tiny: tuple[Any, Any], template: str, retriever: str) -> None:
    chat = Conversation(a_session(tiny, template, retriever=retriever), system="w9 w8")
    for text in said(8):
        check(chat, text)
        assert chat.turn is not None
        if len(chat.messages) > 3:
            # The answer before, at most: the last of its tokens never went through the model.
            added = len(text.split()) + (6 + 20 if template is FORGETFUL else 6)
            assert chat.turn.read <= added
            assert chat.turn.kept > 0


def test_twenty_turns_read_every_token_once(tiny: tuple[Any, Any]) -> None:
    chat, read, answered = Conversation(a_session(tiny, new=9)), 0, 0
    for text in said(20, seed=1):
        chat.ask(text)
        assert chat.turn is not None
        read, answered = read + chat.turn.read, answered + len(chat.turn.tokens) - 1
    assert read + answered == chat.turn.read + chat.turn.kept + 8  # type: ignore[union-attr]
    assert chat.turn.tokens == fresh(chat.session, chat.messages[:-1])  # type: ignore[union-attr]


def test_a_conversation_goes_back_and_on_from_there(tiny: tuple[Any, Any]) -> None:
    chat, texts = Conversation(a_session(tiny)), said(9, seed=2)
    for text in texts[:4]:
        check(chat, text)
    for turns, text in zip((1, 2, 1, 3), texts[4:], strict=False):
        before = len(chat.messages)
        chat.rewind(turns)
        assert len(chat.messages) == before - 2 * turns
        check(chat, text)
    for wrong in (0, 9):
        with pytest.raises(ConfigError, match=f"rewind: got {wrong}, wanted 1 to the"):
            chat.rewind(wrong)


def test_forks_of_a_conversation_go_their_own_ways(tiny: tuple[Any, Any]) -> None:
    chat, texts = Conversation(a_session(tiny)), said(6, seed=3)
    for text in texts[:3]:
        check(chat, text)
    other = chat.fork()
    for one, text in ((chat, texts[3]), (other, texts[4]), (chat, texts[4]), (other, texts[5])):
        check(one, text)
    other.rewind(4)
    check(other, texts[0])
    check(chat, texts[5])


def test_who_stops_early_goes_on_with_what_there_was(tiny: tuple[Any, Any]) -> None:
    chat, texts = Conversation(a_session(tiny)), said(3, seed=4)
    for piece in chat.say(texts[0]):
        if piece:
            break
    assert chat.turn is not None
    assert len(chat.turn.tokens) == 1
    assert chat.messages[-1] == {"role": "assistant", "content": chat.turn.text}
    for text in texts[1:]:
        check(chat, text)


def test_what_fails_in_the_middle_is_read_anew(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    chat, texts = Conversation(a_session(tiny)), said(3, seed=5)
    check(chat, texts[0])
    fail_at(monkeypatch, ResidentStore, "append", 7)
    with pytest.raises(MemoryError):
        chat.ask(texts[1])
    chat.rewind()
    check(chat, texts[2])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_cannot_go_back_is_read_anew_and_says_so(
    family: str, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store without `crop`; a sliding window that has moved on."""
    if family == "llama":
        monkeypatch.setattr(ResidentStore, "crop", Store.crop)
    chat = Conversation(a_session(tiny, FORGETFUL, family, new=40))
    for text in said(4, seed=6):
        check(chat, text)
    assert "read anew, because the cache cannot go back" in caplog.text


def test_what_cannot_be_said_is_refused_and_nothing_changes(tiny: tuple[Any, Any]) -> None:
    session = a_session(tiny)
    chat = Conversation(session)
    check(chat, "w7 w8")
    before = list(chat.messages)
    with pytest.raises(CapacityError, match="context is 2000"):
        chat.ask("w5 " * 2000)
    assert chat.messages == before
    check(chat, "w9")
    session.model.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="tiny has no chat template, which a conversation needs"):
        chat.ask("w7")


def test_tokens_in_common_are_counted_from_the_first() -> None:
    assert common_tokens([], [1]) == 0
    assert common_tokens([1, 2, 3], [1, 2]) == 2
    assert common_tokens([1, 2, 3], [1, 5, 3]) == 1
    assert common_tokens([4], [1]) == 0


def test_the_pages_examples_run(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of the page on requests, with a tiny model in the place of SmolLM2."""
    session = a_session(tiny, new=5)
    monkeypatch.setattr(pariskv.Session, "load", lambda path: session)
    monkeypatch.chdir(Path(__file__).parents[2])
    examples = [block.text for block in blocks("requests", "python")]
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "requests.md", "exec"), {})
        assert capsys.readouterr().out.count("w") >= 15
