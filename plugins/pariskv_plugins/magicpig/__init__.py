"""MagicPIG (arXiv 2410.16179): a random sample of the tokens, weighted to stand for all of them. START READING HERE.

Section 4 of the paper. `tables` hash tables of `bits` bits each are the signs of products with random directions. A key
is in the sample of a query head if it shares the query's bucket in at least two tables, which happens with a known
probability u that grows with their cosine; log u is taken from its score, so that in expectation the sample's softmax
is that of all tokens. Which tokens, and how many, is up to chance and the two options, not to the budget.

    cpu.py      placement cpu, as published: tables, keys and values in host memory; retrieval and attention there
    device.py   placement device: collisions counted on the layer's device; the sampled rows through the store
    sample.py   what both share

Keys are hashed less the mean c of the prompt's keys, which spreads their directions. The paper takes c from every key
that is attended; that shifts all scores of a query head, s q.(k - c), by the same s q.c, which no softmax sees. So
here rows, scores and a soft cap stay those of the model, and only the hashes and the cosine in u know c.

Every query head has its own sample. Tokens that are generated are not indexed, as published; `index_generated` is
ours. The paper keeps four layers dense: `layers: {"0": {retriever: dense}, ...}`, as in configs/magicpig.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from pariskv_kernels.lsh import MAX_BITS, MAX_SEGMENT, hash_codes
from torch import Tensor

from pariskv.errors import ConfigError
from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import Budget, Codes, LayerInfo, Prefill, Query, Selection, Tensors
from pariskv_plugins.magicpig import cpu, device

PLACEMENTS = ("cpu", "device")
MAX_TABLES = 4096
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Options:
    bits: int = 10  # of a hash, K
    tables: int = 150  # hashes of a key, L
    placement: str = "cpu"  # cpu, as published, or device
    index_generated: bool = False  # ours: generated tokens are hashed, too, and leave the dense part
    segment: int = 0  # placement cpu: tokens that share hash tables; 0: every key's hash is compared instead
    seed: int = 42  # of the random directions, which all layers share


class MagicPIG(Retriever):
    """Placement cpu fetches nothing and returns a finished attention, so its `top_k` is without effect: write 1.

    Placement device fetches the union of a group's samples, at most G x top_k rows; of more, those that collide in
    the fewest tables are dropped, and `SampledCodes.dropped` counts them.

    `segment` is also how many tokens leave for the index at a time, and those that do not fill one stay dense: tables
    of a few thousand tokens are fast, and worth it from some hundred thousand tokens on.
    """

    combine = "per_query_head"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options = options or Options()
        check_options(options)
        on_cpu = options.placement == "cpu"
        self.format = f"lsh-{options.placement}-{options.bits}-{options.tables}-{options.segment}-{options.seed}"
        self.block = options.segment or 1
        self.indexes = "all" if options.index_generated else "prompt"
        self.selects_per_query_head = not on_cpu
        self.graph_safe = not on_cpu

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        if self.options.placement == "cpu":
            return cpu.allocate(layer, capacity, self.options)
        return device.allocate(layer, capacity, self.options)

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        """centre [B, H, D] float32: the mean of every row's keys."""
        centre = torch.zeros(layer.batch, layer.kv_heads, layer.head_dim, dtype=torch.float64, device=layer.device)
        for row, length in enumerate(prefill.lengths):
            for keys, _ in prefill.blocks(row):
                centre[row] += keys.double().sum(1) / length
        return {"centre": centre.float()}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        centred = keys.float() - state["centre"].unsqueeze(2)
        hashes = self.hash(centred)
        norms = centred.double().norm(dim=-1).float()
        if self.options.placement == "cpu":
            return cpu.encode(keys, values, norms, hashes, self.options)
        return device.encode(keys, norms, hashes)

    @hookimpl
    def encode_query(self, heads: Tensor, state: Tensors) -> Tensors:
        """hashes [B, H, L, G], and shifts [B, H, G], the inner products with the centre."""
        heads = heads.float()
        return {"hashes": self.hash(heads), "shifts": (heads * state["centre"].unsqueeze(2)).sum(-1)}

    def hash(self, vectors: Tensor) -> Tensor:
        """The buckets [B, H, L, n] of vectors [B, H, n, D]; only their directions matter."""
        options = self.options
        planes = random_planes(vectors.shape[-1], options.bits * options.tables, options.seed, vectors.device)
        return hash_codes(vectors, planes, options.bits)

    @hookimpl
    def coarse_select(self, query: Query, codes: Codes, budget: Budget) -> Selection:
        if self.options.placement == "cpu":
            return cpu.attend_to_sample(query, codes, self.options)
        return device.select_sample(query, codes, budget, self.options)


@lru_cache
def random_planes(head_dim: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Gaussian directions [D, count] float64, drawn on the CPU so that every device has the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, count, generator=generator, dtype=torch.float64).to(device)


def check_options(options: Options) -> None:
    """Raise ConfigError for the first option that means nothing."""
    ranges = {"bits": (1, MAX_BITS), "tables": (2, MAX_TABLES), "segment": (0, MAX_SEGMENT), "seed": (0, MAX_SEED)}
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"magicpig: {name}={value!r}; set it to an integer from {least} to {most}")
    if options.placement not in PLACEMENTS:
        raise ConfigError(f"magicpig: placement={options.placement!r}; set it to one of {', '.join(PLACEMENTS)}")
    if options.segment and options.placement != "cpu":
        raise ConfigError(
            f"magicpig: segment={options.segment}, but placement {options.placement} has no tables; set segment to 0 "
            f"or placement to cpu"
        )


@hookimpl
def register_retrievers(register: Register) -> None:
    register("magicpig", MagicPIG, options=Options)
