"""What a measurement refuses: prompts of which nothing would be retrieved, and those beyond a model's context."""

from __future__ import annotations

from pariskv.config import Config
from pariskv.errors import CapacityError, ConfigError
from pariskv.window import Window


def refuse_attended_prompt(config: Config, tokens: int, what: str = "the prompt") -> None:
    """Raise ConfigError for a prompt so short that all of it is attended to, so that nothing can be measured.

    what  the prompt as the message calls it
    """
    window = config.window
    if not Window(window.sink, window.local, window.update_interval, window.dense_below).zone(tokens):
        least = max(window.dense_below, window.sink + window.local + window.update_interval)
        raise ConfigError(
            f"{what} has {tokens} tokens, all of which every retriever would attend to; "
            f"give it {least} at least, or lower window.dense_below and the window's sizes"
        )


def is_beyond_context(config: Config, context: int | None, tokens: int, steps: int) -> bool:
    """Whether the model has no positions for a prompt and the steps after it, and the configuration minds.

    context  tokens that the model was made for, None where nobody knows
    """
    return context is not None and not config.model.allow_beyond_context and tokens + steps > context


def refuse_beyond_context(
    config: Config, context: int | None, tokens: int, steps: int, what: str = "the prompt"
) -> None:
    """Raise CapacityError where a prompt and the steps after it are `is_beyond_context`."""
    if is_beyond_context(config, context, tokens, steps):
        assert context is not None
        raise CapacityError(
            f"{what} has {tokens} tokens and {steps} are decoded after it, but the model's context is {context}; "
            f"give it {max(0, context - steps)} at most, or set model.allow_beyond_context=true"
        )
