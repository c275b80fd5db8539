"""Tiny random models of the families that pariskv supports, and the run that they are compared with: for tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
MODEL_CLASS = {"Gemma3Text": "Gemma3ForCausalLM"}


def tiny_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family; weights large enough that attention is far from uniform."""
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **changes})
    torch.manual_seed(seed)
    model_class = getattr(transformers, MODEL_CLASS.get(name, f"{name}ForCausalLM"))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the fused one knows no float64
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "proj" in key and weight.dim() == 2 and ("q_" in key or "k_" in key or "qkv" in key):
                weight.mul_(6.0)
    return model


def prompt(tokens: int, seed: int = 0, batch: int = 1) -> Tensor:
    """Random token ids [batch, tokens], none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (batch, tokens), generator=generator)


def greedy(model: Any, ids: Tensor, new_tokens: int, mask: Tensor | None = None, **more: Any) -> Any:
    """What transformers' `generate` returns for `new_tokens` greedy tokens, with the logits of each."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask.long(),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **more,
    )


@torch.no_grad()
def dense_generate(model: Any, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What transformers itself generates greedily, by the model's own eager attention: tokens, logits [B, n, V]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = greedy(model, ids, new_tokens, mask)
    model.set_attn_implementation(before)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)
