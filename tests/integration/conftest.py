"""A tiny model, empty caches and no hub: what the tests of finding and fetching models share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pariskv.integrations import hub
from pariskv.integrations.models import quiet_transformers


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, ours and the hub's, and a hub that cannot be reached."""

    def unreachable(hub_id: str) -> Path:
        raise ConnectionError("no route to host")

    monkeypatch.setenv("PARISKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_download", unreachable)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random llama of 40 words and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16), PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def folder(tmp_path: Path, tiny: tuple[Any, Any]) -> Path:
    """The tiny model as a folder."""
    path = tmp_path / "tiny"
    with quiet_transformers():
        for part in tiny:
            part.save_pretrained(path)
    return path
