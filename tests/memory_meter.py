"""What a request really takes: a run under a meter, for the tests of the memory planner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import language_model, prompt
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import _disable_current_modes

from pariskv import attention
from pariskv.config import Config, GenerationConfig
from pariskv.decode import Batch, generate
from pariskv.integrations.language_model import LanguageModel
from pariskv.meter import Meter
from pariskv.planner import chunk_for

lower_right = attention.causal_lower_right


def unmetered_lower_right(queries: int, tokens: int) -> CausalBias:
    """torch's bias, which is a subclass of Tensor that no dispatch mode may make."""
    with _disable_current_modes():
        return lower_right(queries, tokens)


def peak_of_run(model: Any, config: Config, batch: int, prompt_tokens: int, new_tokens: int) -> int:
    """Bytes beside the weights that are alive at most while a batch is answered."""
    settings = GenerationConfig(max_new_tokens=new_tokens)
    language = model if isinstance(model, LanguageModel) else language_model(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "causal_lower_right", unmetered_lower_right)
        language.new_cache(config).warm_up()
        torch.manual_seed(0)
        with Meter() as meter:
            tokens = prompt(prompt_tokens, batch=batch)
            meter.restart()
            cache = language.new_cache(config)
            chunk = chunk_for(config.prefill.chunk, prompt_tokens)
            for _ in generate(language, cache, Batch(tokens), settings, chunk):
                pass
    return meter.peak
