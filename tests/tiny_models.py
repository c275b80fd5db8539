"""Tiny models as the decode loop wants them."""

from __future__ import annotations

from typing import Any

from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import LoadedModel
from pariskv.integrations.tiny import FAMILIES, SIZES, dense_generate, greedy, prompt, tiny_model

__all__ = ["FAMILIES", "SIZES", "dense_generate", "greedy", "language_model", "prompt", "tiny_model"]


class NoTokenizer:
    pad_token_id, eos_token_id = 0, None


def language_model(model: Any) -> LanguageModel:
    """A tiny model as the decode loop wants it; it has no text."""
    return LanguageModel(LoadedModel(model, NoTokenizer(), "tiny", None))  # type: ignore[arg-type]
