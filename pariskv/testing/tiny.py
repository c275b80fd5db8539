"""A tiny random model that generates by a configuration, beside its own dense attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pariskv.config import parse_config

PROMPT_TOKENS = 150
NEW_TOKENS = 24
WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
"""Small enough that tokens leave for the zone while the model generates."""


@dataclass(frozen=True)
class TinyRun:
    """What was generated, a row each.

    tokens, dense_tokens  by the configuration, and by the model's own attention
    zones                 tokens of each row's zone in the last layer, in the end
    attended              tokens that a query head of that layer attended to, mean over the steps
    """

    tokens: list[list[int]]
    dense_tokens: list[list[int]]
    zones: list[int]
    attended: float


class TinyRuns:
    """Runs of one tiny model in float64, where equal attention gives equal tokens. Needs no download."""

    new_tokens = NEW_TOKENS

    def __init__(self, family: str = "llama", prompt_tokens: int = PROMPT_TOKENS, batch: int = 2):
        from pariskv.integrations.tiny import dense_generate, prompt, tiny_model

        self.model = tiny_model(family)
        self.ids = prompt(prompt_tokens, batch=batch)
        self.dense_tokens: list[list[int]] = dense_generate(self.model, self.ids, self.new_tokens)[0].tolist()

    def compare(
        self, layers: Mapping[str, Any], retrievers: Mapping[str, Any] | None = None, **sections: Any
    ) -> TinyRun:
        """Generate with these `layers:` and `retrievers:`, and further sections (`wrappers=[...]`), as in the YAML."""
        from pariskv.integrations.transformers import ParisCache

        config = parse_config({"window": WINDOW, "retrievers": retrievers or {}, "layers": layers, **sections})
        cache = ParisCache(self.model, config)
        out = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            cache=cache,
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        last = cache.request.layers[max(cache.request.layers)]
        return TinyRun(out[:, self.ids.shape[1] :].tolist(), self.dense_tokens, list(last.zones), last.attended)
