"""`pariskv bench kernels`: every kernel of the default retriever on its own; `fetch.py` adds the stage that fetches.

Each kernel is given one layer after the other, so many that the sign codes alone exceed the L2. What it
reads of the kernel before it (votes, candidates, scores) may still be there, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pariskv.bench.fetch import fetch_row
from pariskv.bench.output import Row, make_row
from pariskv.bench.room import TOO_LARGE, reason, release
from pariskv.bench.timing import Timer, bus_bandwidth, copy_bandwidth, layers_to_cycle
from pariskv.budget import CandidateRule
from pariskv.types import LayerInfo

SUBSPACE_DIM = 8
SEED = 42
STEADY = 64 + 256 + 256
"""Slots of sink and ring at the default window."""


@dataclass(frozen=True)
class Settings:
    """Lengths, rows to select and stores to fetch them from; sizes are those of Llama-3-8B and Qwen3-8B."""

    tokens: tuple[int, ...]
    top_ks: tuple[int, ...]
    stores: tuple[str, ...]
    candidates: str | int | float
    batch: int = 1
    overlap: float = 0.7  # of the rows of consecutive steps, for the fetch
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    copy_size: int = 1 << 30  # bytes, to measure bandwidths with

    @property
    def num_rows(self) -> int:
        per_top_k = 2 + len(self.stores)
        return len(self.tokens) * (6 + per_top_k * len(self.top_ks))

    def info(self, device: torch.device) -> LayerInfo:
        return LayerInfo(
            0, self.batch, self.kv_heads, self.group, self.head_dim, self.dtype, device, self.head_dim**-0.5
        )

    def layers(self, timer: Timer, tokens: int) -> int:
        """Layers whose sign codes together exceed the L2."""
        return layers_to_cycle(self.batch * self.kv_heads * tokens * self.head_dim // 8, timer.l2_bytes)


@dataclass(frozen=True)
class Inputs:
    """What the kernels of one layer read, each made by the kernel before it.

    keys [B, H, N, D], heads [B, H, G, D]; rows [B, H, M, 2, D] of sink, ring and the most slots, all steady and valid
    lengths int32 [B], targets int64 [B] (keys that should collide), count int32 [B] and width C of the candidates
    """

    keys: Tensor
    heads: Tensor
    rows: Tensor
    steady: Tensor
    valid: Tensor
    lengths: Tensor
    count: Tensor
    width: int
    codes: Any  # KeyCodes
    rotated: Tensor
    table: Tensor
    votes: Any  # Votes
    candidates: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Kernel:
    """A launch, and the bytes that it has to move at least."""

    name: str
    call: Callable[[Inputs], object]
    moved: Callable[[Inputs], int]


def measure(settings: Settings, timer: Timer, measured: dict[str, Any]) -> Iterator[Row]:
    """The rows, one by one; the bandwidths that they are compared with go into `measured`."""
    measured["copy_bytes_per_s"] = copy_bandwidth(timer, settings.copy_size)
    measured["bus_bytes_per_s"] = bus_bandwidth(timer, settings.copy_size)
    for tokens in settings.tokens:
        yield from _kernel_rows(settings, timer, tokens, measured["copy_bytes_per_s"])
        release(timer.device)
        for top_k in settings.top_ks:
            for store in settings.stores:
                yield fetch_row(settings, timer, tokens, top_k, store, measured)
                release(timer.device)


def _kernel_rows(settings: Settings, timer: Timer, tokens: int, bandwidth: float) -> Iterator[Row]:
    found = kernels(settings.top_ks)
    try:
        layers = [make_inputs(settings, tokens, timer.device) for _ in range(settings.layers(timer, tokens))]
    except TOO_LARGE as error:
        why = reason(error)
        yield from (make_row("kernels", why, kernel=kernel.name, tokens=tokens) for kernel in found)
        return
    for kernel in found:
        seconds = timer.seconds([partial(kernel.call, layer) for layer in layers])
        moved = kernel.moved(layers[0])
        yield make_row(
            "kernels",
            kernel=kernel.name,
            tokens=tokens,
            us=1e6 * seconds,
            bytes=moved,
            bandwidth_fraction=moved / seconds / bandwidth,
        )


def make_inputs(settings: Settings, tokens: int, device: torch.device) -> Inputs:
    """Random keys and queries, and what each kernel makes of what the one before it made."""
    from pariskv_kernels.collide import collide
    from pariskv_kernels.encode import encode_keys
    from pariskv_kernels.rerank import estimate_scores
    from pariskv_kernels.select import select_by_votes
    from pariskv_kernels.srht import rotate_group_mean
    from pariskv_kernels.tiers import tier_table
    from pariskv_plugins.paris.paper import COLLIDING

    def random(*size: int) -> Tensor:
        return torch.randn(settings.batch, settings.kv_heads, *size, dtype=settings.dtype, device=device)

    most = max(settings.top_ks)
    keys, heads = random(tokens, settings.head_dim), random(settings.group, settings.head_dim)
    lengths = torch.full((settings.batch,), tokens, dtype=torch.int32, device=device)
    width = CandidateRule.parse(settings.candidates).count(tokens, most)
    count = torch.full_like(lengths, width)
    codes = encode_keys(keys, SUBSPACE_DIM, SEED)
    rotated = rotate_group_mean(heads, SEED)
    table = tier_table(rotated, codes.counts, lengths, COLLIDING)
    votes = collide(codes.signs, table, lengths)
    candidates = select_by_votes(votes, count, lengths, width)
    return Inputs(
        keys=keys,
        heads=heads,
        rows=random(2, STEADY + most, settings.head_dim).transpose(2, 3),
        steady=torch.ones(settings.batch, STEADY, dtype=torch.bool, device=device),
        valid=torch.ones(settings.batch, settings.kv_heads, most, dtype=torch.bool, device=device),
        lengths=lengths,
        count=count,
        width=width,
        codes=codes,
        rotated=rotated,
        table=table,
        votes=votes,
        candidates=candidates,
        scores=estimate_scores(rotated, codes.codes, codes.weights, candidates),
    )


def kernels(top_ks: tuple[int, ...]) -> list[Kernel]:
    """The kernels in the order of a step, after `encode`; the last two once for each top_k."""
    from pariskv_kernels.collide import collide
    from pariskv_kernels.encode import encode_keys
    from pariskv_kernels.rerank import estimate_scores
    from pariskv_kernels.select import select_by_votes
    from pariskv_kernels.srht import rotate_group_mean
    from pariskv_kernels.tiers import tier_table
    from pariskv_plugins.paris.paper import COLLIDING

    return [
        Kernel(
            "encode",
            lambda one: encode_keys(one.keys, SUBSPACE_DIM, SEED),
            lambda one: _bytes(one.keys, *one.codes),
        ),
        Kernel(
            "rotate query",
            lambda one: rotate_group_mean(one.heads, SEED),
            lambda one: _bytes(one.heads, one.rotated),
        ),
        Kernel(
            "tier table",
            lambda one: tier_table(one.rotated, one.codes.counts, one.lengths, COLLIDING),
            lambda one: _bytes(one.rotated, one.codes.counts, one.table),
        ),
        Kernel(
            "collide",
            lambda one: collide(one.codes.signs, one.table, one.lengths),
            lambda one: _bytes(one.codes.signs, one.table, *one.votes),
        ),
        Kernel(
            "select votes",
            lambda one: select_by_votes(one.votes, one.count, one.lengths, one.width),
            lambda one: _bytes(*one.votes, one.candidates),
        ),
        Kernel(
            "rerank",
            lambda one: estimate_scores(one.rotated, one.codes.codes, one.codes.weights, one.candidates),
            lambda one: _candidate_bytes(one) + _bytes(one.candidates, one.scores),
        ),
        *(kernel for top_k in top_ks for kernel in _kernels_by_top_k(top_k)),
    ]


def _kernels_by_top_k(top_k: int) -> tuple[Kernel, Kernel]:
    from pariskv_kernels.attend import attend_rows
    from pariskv_kernels.select import select_by_scores

    def attend(one: Inputs) -> object:
        rows, valid = one.rows[:, :, : STEADY + top_k], one.valid[:, :, :top_k]
        return attend_rows(one.heads, rows, one.steady, valid, None, one.heads.shape[-1] ** -0.5, None)

    def attended(one: Inputs) -> int:
        row = one.rows[0, 0, 0]
        return one.valid[:, :, 0].numel() * (STEADY + top_k) * row.nbytes + 2 * one.heads.nbytes

    return (
        Kernel(
            f"select scores {top_k}",
            lambda one: select_by_scores(one.scores, one.candidates, top_k),
            lambda one: _bytes(one.scores, one.candidates) + 4 * top_k * one.scores[:, :, 0].numel(),
        ),
        Kernel(f"attend {top_k}", attend, attended),
    )


def _candidate_bytes(one: Inputs) -> int:
    """Codes and weights of the candidates alone."""
    per_key: int = one.codes.codes[0, 0, 0].nbytes + one.codes.weights[0, 0, 0].nbytes
    return one.candidates.numel() * per_key


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
