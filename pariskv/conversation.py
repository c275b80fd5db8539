"""A chat over one live cache: of a turn only what the cache does not hold already goes through the model.

Before a turn the whole conversation is rendered by the model's chat template, as a fresh run would be. What the cache
holds in common with it stays; the rest is cropped (what a template takes back, such as earlier thinking; turns that
were rewound), and what follows is read, with dense attention to the history unless `prefill.turns` says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pariskv.decode import Batch, prefill
from pariskv.errors import BindingError, ConfigError, ModelError, PluginContractError
from pariskv.planner import chunk_for
from pariskv.prefix import Prefix

if TYPE_CHECKING:
    from pariskv.session import Session

logger = logging.getLogger(__name__)

Message = dict[str, str]
"""`role` (system, user, assistant) and `content`, as chat templates take them."""


@dataclass
class Turn:
    """An answer, filled as it comes.

    read  tokens that went through the model before it;  kept  those that the cache had already
    """

    read: int
    kept: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class Conversation:
    """A chat of a session's model.

    messages  what was said so far
    turn      the newest answer, None before the first

    >>> chat = Conversation(session)
    >>> chat.ask("Why is the sky blue?")
    >>> for piece in chat.say("And at night?"):
    ...     print(piece, end="", flush=True)
    >>> chat.rewind()
    """

    def __init__(self, session: Session, system: str = ""):
        self.session = session
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.turn: Turn | None = None
        self._prefix: Prefix | None = None  # the live cache, and the tokens that it holds

    def ask(self, text: str) -> str:
        """The answer to what the user says next."""
        return "".join(self.say(text))

    def say(self, text: str) -> Iterator[str]:
        """The answer piece by piece; whoever stops early keeps what there was, and may go on with the next turn.

        Raises ConfigError for a model without a chat template, CapacityError where the conversation is too long.
        """
        from pariskv.integrations.language_model import TextStream

        model, settings = self.session.model, self.session.config.generation
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = model.render(messages)
        self.session.refuse_beyond_context(len(ids))
        turn, stream = self._read(ids), TextStream(model)
        self.turn, self.messages = turn, messages
        try:
            assert self._prefix is not None
            for (token,) in self._prefix.generate(model, settings, self.session.config.runtime):
                assert token is not None
                turn.tokens.append(token)
                yield stream.push(token)
        except GeneratorExit:
            self._keep(ids, turn)
            raise
        except BaseException:
            self._prefix = None  # nobody knows what the cache holds now
            raise
        else:
            self._keep(ids, turn)
        finally:
            turn.text = stream.text
            self.messages = [*messages, {"role": "assistant", "content": turn.text}]

    def rewind(self, turns: int = 1) -> None:
        """Forget the newest turns, what the user said and the answers; the cache goes back with the next turn."""
        said = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not 1 <= turns <= len(said):
            raise ConfigError(f"rewind: got {turns}, wanted 1 to the {len(said)} turns that there are")
        self.messages = self.messages[: said[-turns]]

    def fork(self) -> Conversation:
        """Another conversation with the same history, whose keys and values it shares (`ParisCache.fork`)."""
        other = Conversation(self.session)
        other.messages = [dict(message) for message in self.messages]
        if self._prefix is not None:
            other._prefix = self._prefix.fork(self.session.config.generation.max_new_tokens)
        return other

    def _read(self, ids: Sequence[int]) -> Turn:
        """Bring the cache to exactly these tokens."""
        kept = self._go_back(ids)
        session, new_tokens = self.session, self.session.config.generation.max_new_tokens
        batch = session.model.batch_of([ids[kept:]])
        chunk = chunk_for(session.config.prefill.chunk, len(ids) - kept)
        prefix, self._prefix = self._prefix, None  # until it is read as a whole
        if prefix is None:
            cache = session.cache_for(batch)
            prefix = Prefix(cache, batch, prefill(session.model, cache, batch, new_tokens, chunk))
        else:
            prefix.append(session.model, batch.tokens, new_tokens, chunk)
        self._prefix = prefix
        return Turn(len(ids) - kept, kept)

    def _go_back(self, ids: Sequence[int]) -> int:
        """Crop the cache to what it has in common with the tokens, less one at least; how many these are."""
        if self._prefix is None:
            return 0
        held = self._prefix.lengths[0]
        kept = min(common_tokens(self._prefix.batch.tokens[0].tolist(), ids), len(ids) - 1)
        try:
            if kept < held:
                self._prefix.cache.crop(kept - held)
        except (BindingError, PluginContractError, ModelError) as error:
            logger.warning("the conversation is read anew, because the cache cannot go back: %s", error)
            kept = 0
        self._prefix = Prefix(self._prefix.cache, Batch(self._prefix.batch.tokens[:, :kept])) if kept else None
        return kept

    def _keep(self, ids: Sequence[int], turn: Turn) -> None:
        """Note what the cache holds: of what was generated, all but the last token went through the model."""
        assert self._prefix is not None
        held = torch.tensor([[*ids, *turn.tokens[:-1]]], device=self.session.model.device)
        self._prefix = Prefix(self._prefix.cache, Batch(held))


def common_tokens(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, two, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))
