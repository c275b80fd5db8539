"""A prompt that was read, kept in a file: save, load, continue.

    Prefix        a live cache with the tokens that it holds and the logits after them
    save_prefix   one safetensors file: keys, values, codes and everything that a continuation needs
    load_prefix   the same cache again, on this machine or another; refused by name where it does not belong
    prefix_info   what a file says of itself; reads the header only

`Session.read_prefix`, `load_prefix` and `continue_prefix` do the same for texts. The file is described in `file.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pariskv.config import Config, GenerationConfig, RuntimeConfig, to_dict
from pariskv.decode import READING, Batch, decode, refuse_prompt_logits
from pariskv.errors import PrefixError, noted
from pariskv.prefix.file import TOKENS, VERSION, PrefixFile, write_file
from pariskv.prefix.header import hash_tokens, refuse_mismatch
from pariskv.prefix.parts import Part, tensor_part
from pariskv.request import HEADROOM

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.transformers import ParisCache

__all__ = ["Prefix", "PrefixInfo", "load_prefix", "prefix_info", "save_prefix"]


@dataclass
class Prefix:
    """A prompt that a cache has read.

    cache         between two steps; whoever generates with it continues it, so `fork` it first to do so again
    batch         every token that it holds, padding on the left
    logits        [B, V] after the last token; None: it can be continued by more tokens only
    tail          text that ends the turn which the prefix begins, of the chat template
    read_seconds  how long its file took, from the disk into the cache; None where it comes from none
    """

    cache: ParisCache
    batch: Batch
    logits: Tensor | None = None
    tail: str = ""
    read_seconds: float | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in rows_of(self.batch)]

    def fork(self, new_tokens: int = HEADROOM) -> Prefix:
        """The same prefix, to be continued in another way; what is in the store is shared (`ParisCache.fork`)."""
        return replace(self, cache=self.cache.fork(new_tokens))

    def append(self, model: LanguageModel, tokens: Tensor, new_tokens: int, chunk: int | None = None) -> None:
        """Read more tokens [B, Q] of every row, with dense attention to the prefix.

        new_tokens  that will be generated after them
        chunk       tokens that go through the model at a time, None for all of them
        """
        held, mask, added = self.batch.tokens.shape[1], self.batch.mask, tokens.shape[1]
        if self.batch.mask is not None:
            mask = torch.nn.functional.pad(self.batch.mask, (0, added), value=True)
        whole = Batch(torch.cat((self.batch.tokens, tokens), dim=1), mask)
        positions = whole.positions()
        self.cache.request.begin_prefill(held + added, new_tokens)
        with torch.no_grad():
            for start in range(held, held + added, chunk or added):
                stop = min(start + (chunk or added), held + added)
                seen = None if mask is None else mask[:, :stop]
                with noted(READING):
                    logits = model.forward(whole.tokens[:, start:stop], positions[:, start:stop], seen, self.cache)
        refuse_prompt_logits(logits)
        with noted(READING):
            self.cache.end_prefill()
        self.batch, self.logits = whole, logits

    def generate(
        self, model: LanguageModel, settings: GenerationConfig, runtime: RuntimeConfig | None = None
    ) -> Iterator[list[int | None]]:
        """Yield each step's new token per row, None once a row has ended."""
        if self.logits is None:
            raise PrefixError(
                "logits: the prefix was saved without them, so its next token is not known; append tokens first"
            )
        yield from decode(model, self.cache, self.batch, self.logits, settings, runtime or RuntimeConfig())


@dataclass(frozen=True)
class PrefixInfo:
    """What a file says of itself.

    sha256   of the header, which has the digests of all tensors
    belongs  model, tokenizer, retrievers and layers: what it can be loaded with
    held     lengths of the rows, columns, zones, and the hash of the token ids
    about    what wrote it
    """

    path: str
    bytes: int
    sha256: str
    version: int
    belongs: dict[str, Any]
    held: dict[str, Any]
    about: dict[str, Any]


def save_prefix(path: str | Path, prefix: Prefix, model: LanguageModel) -> PrefixInfo:
    """Write a prefix to a file, which is there as a whole or not at all.

    The cache stays as it is, and can be continued. Raises PrefixError where the batch is not what the cache holds,
    where a layer cannot be saved, and for what the file system refuses.
    """
    from pariskv import __version__
    from pariskv.integrations import cache_parts

    cache, batch = prefix.cache, prefix.batch
    cache_parts.settle(cache)
    _refuse_other_batch(prefix)
    held = {
        "rows": prefix.lengths,
        "columns": batch.tokens.shape[1],
        "tokens": hash_tokens(rows_of(batch)),
        "tail": prefix.tail,
        "has_logits": prefix.logits is not None,
        "layers": cache_parts.describe(cache),
    }
    about = {
        "pariskv": __version__,
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(model.device),
        "config": to_dict(cache.config),
    }
    parts = [*cache_parts.parts_of(cache), tensor_part(TOKENS, batch.tokens)]
    if prefix.logits is not None:
        parts.append(tensor_part("logits", prefix.logits))
    header = {"belongs": _belongs(cache, model), "held": held, "about": about}
    write_file(Path(path), header, parts)
    return prefix_info(path)


def _belongs(cache: ParisCache, model: LanguageModel) -> dict[str, Any]:
    from pariskv.integrations.cache_parts import belongs_to
    from pariskv.integrations.identity import identity_of, tokenizer_hash

    return {
        "model": identity_of(model.model),
        "tokenizer": tokenizer_hash(model.tokenizer),
        **belongs_to(cache),
    }


def _refuse_other_batch(prefix: Prefix) -> None:
    """Raise PrefixError where the cache has gone on, or holds something else."""
    columns, given = prefix.cache.get_seq_length(), prefix.batch.tokens.shape[1]
    if columns != given or prefix.cache.request.lengths != prefix.lengths:
        raise PrefixError(
            f"tokens: the batch has {given} columns with {prefix.lengths} tokens, the cache holds {columns} with "
            f"{prefix.cache.request.lengths}; give all tokens that went through the model (of what was generated, all "
            f"but the last)"
        )


def load_prefix(
    path: str | Path,
    model: LanguageModel,
    config: Config | None = None,
    *,
    new_cache: Callable[[Batch], ParisCache] | None = None,
    tokens: Batch | None = None,
    sha256: str | None = None,
) -> Prefix:
    """A saved prefix as a live cache, which goes on as the saved one would have.

    config     as the cache was made with
    new_cache  makes the empty cache for a batch, by default from `config` where memory allows
    tokens     refuse the prefix unless it is of these tokens
    sha256     refuse the file unless its header, and so all of it, has this digest (`prefix_info(path).sha256`)

    Raises PrefixError, which names the field: for a file that is cut off or was changed, for another model, tokenizer,
    dtype, retriever, option, window or token. Nothing of the file is used then.
    """
    with PrefixFile.open(Path(path)) as file:
        if sha256 is not None and sha256 != file.sha256:
            raise file.refusal("sha256", f"wanted {sha256}, the file has {file.sha256}; get the right file")
        return _load(file, model, config or Config(), new_cache, tokens)


def _load(
    file: PrefixFile,
    model: LanguageModel,
    config: Config,
    new_cache: Callable[[Batch], ParisCache] | None,
    tokens: Batch | None,
) -> Prefix:
    from pariskv.integrations.cache_parts import Filling

    with file.understood():
        batch = _read_batch(file, model.device)
    if tokens is not None and (given := hash_tokens(rows_of(tokens))) != hash_tokens(rows_of(batch)):
        raise file.refusal("tokens", f"the prefix is of another text (here {given}); load the one of this text")
    cache = new_cache(batch) if new_cache else _checked_cache(model, config, batch)
    refuse_mismatch(file, _belongs(cache, model))
    logits: Tensor | None = None
    filling: Filling | None = None

    def prepare() -> list[Part]:
        nonlocal filling, logits
        with file.understood():
            filling = Filling(cache, file, cache.config.generation.max_new_tokens)
            if not file.header["held"]["has_logits"]:
                return filling.parts
            entry = file.tensors["logits"]
            logits = torch.empty(entry.shape, dtype=entry.dtype, device=model.device)
            return [*filling.parts, tensor_part("logits", logits)]

    started = time.perf_counter()
    file.fill(prepare)
    assert filling is not None
    filling.finish()
    seconds = time.perf_counter() - started
    return Prefix(cache, batch, logits, str(file.header["held"].get("tail", "")), seconds)


def _checked_cache(model: LanguageModel, config: Config, batch: Batch) -> ParisCache:
    """An empty cache, if memory allows."""
    cache = model.new_cache(config)
    if config.runtime.check_memory:
        rows, columns = batch.tokens.shape
        cache.planner.refuse(rows, columns, config.generation.max_new_tokens)
    return cache


def _read_batch(file: PrefixFile, device: torch.device) -> Batch:
    held = file.header["held"]
    tokens = file.token_ids()
    columns = torch.arange(held["columns"])
    mask = columns >= held["columns"] - torch.tensor(held["rows"]).unsqueeze(1)
    batch = Batch(tokens.to(device), None if mask.all() else mask.to(device))
    if hash_tokens(rows_of(batch)) != held["tokens"]:
        raise file.refusal("tokens", "the token ids are not those of the header; save it again")
    return batch


def prefix_info(path: str | Path) -> PrefixInfo:
    """What a file says of itself; its header is checked, its tensors are not looked at."""
    with PrefixFile.open(Path(path)) as file:
        header = file.header
        return PrefixInfo(
            str(path), file.nbytes, file.sha256, VERSION, header["belongs"], header["held"], header["about"]
        )


def rows_of(batch: Batch) -> list[list[int]]:
    """The token ids of each row, without its padding."""
    rows: list[list[int]] = batch.tokens.tolist()
    if batch.mask is None:
        return rows
    return [row[len(row) - int(real) :] for row, real in zip(rows, batch.mask.sum(dim=1).tolist(), strict=True)]
