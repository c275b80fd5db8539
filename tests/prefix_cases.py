"""Prefixes of tiny random models, for tests that save and load them; as a program, goes on with those of a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root / folder) for folder in (".", "plugins", "kernels", "tests")]
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import torch
from tiny_models import language_model, prompt, tiny_model
from torch import Tensor

from pariskv import TOKENS, CodeField, Codes, ParisCache, Register, Retriever, Selection, Store, hookimpl, parse_config
from pariskv.config import Config
from pariskv.decode import Batch, prefill
from pariskv.integrations.language_model import LanguageModel
from pariskv.prefix import Prefix, load_prefix, save_prefix
from pariskv.registry import Registry, Source
from pariskv.types import Budget, LayerInfo, Query, Selected, Tensors

NEW = 60
"""Tokens after the prefix: six updates of a row at least."""

WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}

CASES: dict[str, dict[str, Any]] = {
    "pariskv": {},
    "pariskv-paper": {"layers": {"default": {"retriever": "pariskv-paper", "top_k": 16}}},
    "quest": {"layers": {"default": {"retriever": "quest", "rerank": "none", "top_k": 16}}},
    "pqcache": {
        "layers": {"default": {"retriever": "pqcache", "top_k": 16}},
        # So that it learns again after it was loaded.
        "retrievers": {"pqcache": {"bits": 3, "refresh": 16}},
    },
    "exact": {"layers": {"default": {"retriever": "exact", "top_k": 16}}},
    "magicpig": {"layers": {"default": {"retriever": "magicpig", "top_k": 1}}},
    "snapkv": {"layers": {"default": {"retriever": "snapkv", "top_k": 16}}},
    "shadowkv": {
        "layers": {"default": {"retriever": "shadowkv", "top_k": 16}},
        "retrievers": {"shadowkv": {"rank": 8, "outliers": 2}},
    },
    "dense": {"layers": {"default": {"retriever": "dense"}}},
    "evict": {"layers": {"default": {"retriever": "window"}}, "store": "evict"},
    "host": {"store": "host"},
    "mixed": {
        "layers": {
            "default": {"retriever": "pariskv", "top_k": 16},
            "0": {"retriever": "dense"},
            "1": {"retriever": "quest", "rerank": "none"},
        }
    },
    "ragged": {},
    "sliding": {},
}


def config_of(name: str, changes: dict[str, Any] | None = None) -> Config:
    """The configuration of a case, with whole sections replaced."""
    base = {"layers": {"default": {"retriever": "pariskv", "top_k": 16}}, "window": WINDOW}
    more = changes or {}
    window = {"window": {**WINDOW, **more.get("window", {})}}
    return parse_config({**base, "generation": {"max_new_tokens": NEW}, **CASES.get(name, {}), **more, **window})


def a_model(name: str) -> LanguageModel:
    return language_model(tiny_model("gemma3" if name == "sliding" else "llama", torch.float32))


def ids_of(name: str) -> tuple[Tensor, Tensor | None]:
    """Token ids and mask; ragged: rows of 150, 61 and 3 tokens."""
    if name != "ragged":
        return prompt(150), None
    mask = torch.arange(150) >= 150 - torch.tensor([[150], [61], [3]])
    return prompt(150, batch=3).masked_fill(~mask, 0), mask


def new_cache(name: str, model: LanguageModel) -> ParisCache:
    if name == "plugin":
        config = parse_config(
            {
                "layers": {"default": {"retriever": "newest", "top_k": 16}},
                "store": "list",
                "window": WINDOW,
                "generation": {"max_new_tokens": NEW},
            }
        )
        return ParisCache(model.model, config, plugin_registry())
    return ParisCache(model.model, config_of(name))


def read(
    name: str, model: LanguageModel | None = None, cache: ParisCache | None = None
) -> tuple[LanguageModel, Prefix]:
    """A model, and the prefix of a case as it has read it."""
    model, batch = model or a_model(name), Batch(*ids_of(name))
    cache = cache or new_cache(name, model)
    return model, Prefix(cache, batch, prefill(model, cache, batch, NEW))


def saved(name: str, folder: Path, model: LanguageModel | None = None, cache: ParisCache | None = None) -> Path:
    model, prefix = read(name, model, cache)
    save_prefix(folder / f"{name}.safetensors", prefix, model)
    return folder / f"{name}.safetensors"


def continued(name: str, model: LanguageModel, prefix: Prefix) -> list[list[int | None]]:
    """What it goes on with, greedily."""
    return list(prefix.generate(model, config_of(name).generation))


class Words:
    """A tokenizer of a few words, without a backend."""

    pad_token_id, eos_token_id = 0, None
    all_special_tokens = ()

    def __init__(self, words: dict[str, int]):
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return self.words


# A plugin that knows nothing of prefixes


class ListStore(Store):
    """Rows of each batch row as a list of blocks."""

    def __init__(self, layer: LayerInfo, capacity: int):
        self.layer, self.capacity, self.length = layer, capacity, [0] * layer.batch
        empty = torch.empty(layer.kv_heads, 0, layer.head_dim, dtype=layer.dtype)
        self.rows = [(empty, empty) for _ in self.length]

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = self.rows[row]
        return keys[:, start:stop], values[:, start:stop]

    def grow(self, capacity: int) -> None:
        self.capacity = capacity

    @property
    def host_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.rows)

    @property
    def device_bytes(self) -> int:
        return 1


class Lists(Retriever):
    @hookimpl
    def allocate_store(self, layer: LayerInfo, capacity: int) -> Store:
        return ListStore(layer, capacity)

    @hookimpl
    def update(self, keys: Tensor, values: Tensor, store: Store, rows: list[int]) -> None:
        assert isinstance(store, ListStore)
        for source, row in enumerate(rows):
            old = store.rows[row]
            new = (keys[source], values[source])
            store.rows[row] = (torch.cat((old[0], new[0]), dim=1), torch.cat((old[1], new[1]), dim=1))
            store.length[row] += keys.shape[2]

    @hookimpl
    def fetch(self, selection: Selection, store: Store, slots: Tensor) -> Selected:
        assert isinstance(store, ListStore)
        for row, (keys, values) in enumerate(store.rows):
            tokens = selection.indices[row].clamp(min=0).long().unsqueeze(-1).expand(-1, -1, keys.shape[-1])
            slots[row, :, :, 0] = keys.gather(1, tokens)
            slots[row, :, :, 1] = values.gather(1, tokens)
        return Selected(selection.indices >= 0, selection.bias)


class Newest(Retriever):
    """Scores pages of four tokens by a mean that lies with its tokens last, less a sum over all of them."""

    format, block = "newest", 4

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        means = CodeField((layer.head_dim, TOKENS), torch.float32, tokens_per_entry=4)
        total = CodeField((layer.head_dim,), torch.float32, reduce="sum")
        return Codes.empty(layer, capacity, means=means, total=total)

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"means": keys.unflatten(2, (-1, 4)).mean(3).transpose(2, 3), "total": keys.sum(2)}

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        mean = query.heads.mean(2).unsqueeze(2)  # [B, H, 1, D]
        centred = codes["means"] - codes["total"].unsqueeze(3) / codes.length.view(-1, 1, 1, 1)
        scores = (mean @ centred).squeeze(2).repeat_interleave(4, dim=-1)
        position = torch.arange(scores.shape[-1])
        best = scores.masked_fill(position >= codes.length.view(-1, 1, 1), -torch.inf).topk(budget.width).indices
        return Selection(best.masked_fill(position[: budget.width] >= budget.count.view(-1, 1, 1), -1).int())


def plugin_registry() -> Registry:
    registry = Registry.load(entry_points=False)

    @hookimpl
    def register_retrievers(register: Register) -> None:
        register("newest", Newest)
        register("list", Lists)

    registry._add(Source("lists", "tests", "0"), lambda: SimpleNamespace(register_retrievers=register_retrievers))
    return registry


def main(folder: Path) -> None:
    """Print what each prefix of the folder goes on with."""
    torch.set_num_threads(1)
    found = {}
    for name in CASES:
        model = a_model(name)
        loaded = load_prefix(folder / f"{name}.safetensors", model, config_of(name))
        found[name] = continued(name, model, loaded)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
