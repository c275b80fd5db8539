"""Randomly initialised models of published sizes, and dense steps over transformers' static cache: for benchmarks.

transformers is imported inside functions, so that commands without a model start fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig

    from pariskv.config import Config
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.plan import Described

DENSE = "pariskv_dense"
"""The baseline's name in transformers' attention interface."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "llama3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
"""The published sizes by name, as transformers' configurations take them."""

POSITIONS = 1 << 22
"""Positions that a random model is made for; its rotary embedding is computed, so they cost nothing."""


class NoTokenizer:
    """A random model has no text."""

    pad_token_id = eos_token_id = None


def shape_config(sizes: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of these sizes without an end token."""
    import transformers

    found: PreTrainedConfig = transformers.AutoConfig.for_model(
        **sizes, bos_token_id=None, eos_token_id=None, max_position_embeddings=POSITIONS
    )
    return found


def described_shape(sizes: dict[str, Any], config: Config, device: torch.device) -> Described:
    """What a plan needs of a model of these sizes in bfloat16: no weights, and nothing from the hub."""
    import torch

    from pariskv.integrations.activations import meta_model
    from pariskv.integrations.described import described
    from pariskv.plan import for_machine

    return described(meta_model(shape_config(sizes), torch.bfloat16), for_machine(config, device), device)


def random_model(sizes: dict[str, Any], name: str, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """A model of one of `SHAPES` with random weights, made on the device; it has no end token, so it never ends."""
    import torch
    import transformers

    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.models import LoadedModel

    config = shape_config(sizes)
    automatic: Any = transformers.AutoModelForCausalLM  # has no types
    torch.manual_seed(0)
    with device:
        model = automatic.from_config(config, dtype=dtype).eval()
    return LanguageModel(LoadedModel(model, cast(Any, NoTokenizer()), name, None))


def static_cache(model: Any, batch: int, tokens: int) -> Any:
    """transformers' static cache with room for exactly `tokens` tokens a row, full of random keys and values."""
    import transformers

    config = model.config
    cache: Any = transformers.StaticCache(config=config, max_cache_len=tokens)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def rewind(cache: Any, tokens: int) -> None:
    """Let a static cache hold `tokens` tokens again: the next step writes after them."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(tokens)


@contextmanager
def dense_without_mask(model: Any) -> Iterator[None]:
    """The model attends to all rows of its cache by SDPA, written or not.

    The mask that transformers makes for a static cache would rule out the fast backends.
    """
    from transformers import AttentionInterface

    from pariskv.integrations.transformers import use_attention

    before = model.config._attn_implementation
    AttentionInterface.register(DENSE, _attend_to_all)
    use_attention(model, DENSE)
    try:
        yield
    finally:
        use_attention(model, before)


def _attend_to_all(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    from pariskv.attention import dense_attention

    return dense_attention(query, key, value, None, kwargs["scaling"]).transpose(1, 2), None
