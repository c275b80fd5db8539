"""An environment with the built wheel of pariskv, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.fresh import ROOT, Environment, build_wheel, new_environment


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment, away from the checkout, with pariskv in it."""
    environment = new_environment(tmp_path_factory.mktemp("installed"))
    environment.install(build_wheel(ROOT, environment.folder / "wheels"))
    return environment


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 97 words and its tokenizer, as a folder that `model.name` can name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from pariskv.integrations.models import quiet_transformers
    from pariskv.integrations.tiny import tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with quiet_transformers():
        tiny_model("llama").float().save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder
