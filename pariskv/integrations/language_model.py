"""A transformers model as `pariskv.decode` wants it, its dense baseline, and text in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from pariskv.config import Config
from pariskv.decode import Batch, DecodeCache
from pariskv.errors import ConfigError
from pariskv.integrations.compiled import CompiledForward
from pariskv.integrations.models import LoadedModel, load_model
from pariskv.integrations.paris_layer import ATTENTION
from pariskv.integrations.transformers import DenseCache, ParisCache, use_attention
from pariskv.registry import Registry

GOES_ON = "[pariskv: the user's turn goes on here]"
"""Put into a chat template to find where a turn's text ends in it."""


class LanguageModel:
    """A loaded model with its tokenizer: implements `pariskv.decode.Model`.

    Raises ModelError where the model cannot be found, loaded or served.
    """

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self.model: Any = loaded.model
        self.tokenizer: Any = loaded.tokenizer
        self.context_length = loaded.context_length
        self.eos_ids = _eos_ids(self.model, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self._compiled: CompiledForward | None = None
        self._known: dict[object, Any] = {}  # what the memory planner measured of this model
        self.pad_id = int(pad if pad is not None else next(iter(self.eos_ids), 0))

    @cached_property
    def _registry(self) -> Registry:
        """What is installed when the first cache is made; looking takes longer than a short prompt."""
        return Registry.load()

    @classmethod
    def load(cls, config: Config) -> LanguageModel:
        m = config.model
        return cls(load_model(m.name, m.dtype, m.device, m.trust_remote_code))

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: DecodeCache) -> Tensor:
        """Logits [B, V] of the last of the tokens [B, Q]."""
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None if mask is None else mask.long(),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cast(Tensor, out.logits[:, -1])

    def forward_step(self, tokens: Tensor, positions: Tensor, cache: DecodeCache, compile: bool = False) -> Tensor:
        """`forward` of one token a row: no mask, since our attention knows what a row holds."""
        if not compile:
            return self.forward(tokens, positions, None, cache)
        self._compiled = self._compiled or CompiledForward(self.model)
        return self._compiled(tokens, positions, cast(ParisCache, cache))

    def new_cache(self, config: Config) -> ParisCache:
        return ParisCache(self.model, config, self._registry, known=self._known)

    @contextmanager
    def dense(self) -> Iterator[DenseCache]:
        """transformers' own cache under transformers' own SDPA attention: the baseline."""
        use_attention(self.model, "sdpa")
        try:
            yield DenseCache(config=self.model.config)
        finally:
            use_attention(self.model, ATTENTION)

    def encode(self, prompts: Sequence[str], chat: str = "off") -> Batch:
        """Prompts as left-padded token ids; `chat` auto or on puts them through the chat template.

        Raises ConfigError for an empty prompt, or chat: on without a template.
        """
        return self.batch_of([self._ids(prompt, chat) for prompt in prompts])

    def batch_of(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Token ids as a batch, padded on the left; raises ConfigError for a row without any."""
        if not all(rows):
            raise ConfigError("the prompt is empty: it holds no token; give --prompt or --prompt-file some text")
        longest = max(map(len, rows))
        tokens = torch.full((len(rows), longest), self.pad_id)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for index, ids in enumerate(rows):
            tokens[index, longest - len(ids) :] = torch.tensor(ids)
            mask[index, longest - len(ids) :] = True
        padded = any(len(ids) != longest for ids in rows)
        return Batch(tokens.to(self.device), mask.to(self.device) if padded else None)

    def open_turn(self, text: str, chat: str = "off") -> tuple[list[int], str]:
        """Token ids of a user's turn that begins with the text and goes on, and the template's text that ends it.

        Without a template the turn is the text, and nothing ends it.
        """
        if not self.uses_template(chat) or not text:
            return self._ids(text, "off"), ""
        messages = [{"role": "user", "content": text + GOES_ON}]
        whole = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head, _, tail = str(whole).rpartition(GOES_ON)
        return self.plain_ids(head), tail

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation through the chat template, up to where the model's answer begins.

        Raises ConfigError where the tokenizer has no template.
        """
        if not self.uses_template("auto"):
            raise ConfigError(f"{self.loaded.name} has no chat template, which a conversation needs; use a chat model")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.plain_ids(str(text))

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of the text alone, without those that the tokenizer begins a prompt with."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def uses_template(self, chat: str) -> bool:
        """Whether `chat` (auto, on, off) puts prompts through the tokenizer's chat template."""
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        if chat == "on" and not has_template:
            raise ConfigError(f"generation.chat=on: {self.loaded.name} has no chat template; use auto or off")
        return chat != "off" and has_template

    def _ids(self, prompt: str, chat: str) -> list[int]:
        if not prompt:
            return []
        if not self.uses_template(chat):
            return list(self.tokenizer(prompt).input_ids)
        return self.render([{"role": "user", "content": prompt}])

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text).input_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class TextStream:
    """Tokens to text, piece by piece: a piece comes out once its characters are complete."""

    def __init__(self, model: LanguageModel):
        self.model = model
        self.tokens: list[int] = []
        self._context = 0  # decoding starts here, so that a piece keeps its leading space
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes, often empty in scripts of several bytes a character."""
        self.tokens.append(token)
        before = self.model.decode(self.tokens[self._context : self._shown])
        now = self.model.decode(self.tokens[self._context :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self.tokens)
        return now[len(before) :]

    @property
    def text(self) -> str:
        return self.model.decode(self.tokens)


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found = getattr(model.generation_config, "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    ids = found if isinstance(found, list | tuple) else [] if found is None else [found]
    return tuple(int(token) for token in ids)
