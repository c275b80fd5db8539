"""`pariskv bench kernels`: the kernels of `pariskv` and `pariskv-paper`, each alone; the fetch is in `fetch.py`.

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
from pariskv.types import LayerInfo, Tensors

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
        return len(self.tokens) * (11 + per_top_k * len(self.top_ks))

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
    `frame` is what a prompt teaches `pariskv`: all that `learn_frame` returns
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
    frame: Tensors
    framed: Any  # Framed
    codes: Any  # KeyCodes
    query: Any  # FramedQueries
    linear: Tensor
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
    from pariskv_kernels.collide import collide_scaled
    from pariskv_kernels.encode import encode_keys
    from pariskv_kernels.frame import queries_to_frame, to_frame
    from pariskv_kernels.linear import linear_table
    from pariskv_kernels.rerank import estimate_scores
    from pariskv_kernels.select import select_by_votes
    from pariskv_kernels.srht import rotate_group_mean
    from pariskv_kernels.tiers import tier_table
    from pariskv_plugins.paris.framed import ParisKV
    from pariskv_plugins.paris.paper import COLLIDING

    def random(*size: int) -> Tensor:
        return torch.randn(settings.batch, settings.kv_heads, *size, dtype=settings.dtype, device=device)

    most = max(settings.top_ks)
    keys, heads = random(tokens, settings.head_dim), random(settings.group, settings.head_dim)
    lengths = torch.full((settings.batch,), tokens, dtype=torch.int32, device=device)
    width = CandidateRule.parse(settings.candidates, ParisKV.candidate_ratios).count(tokens, most)
    count = torch.full_like(lengths, width)
    frame = _any_frame(settings, device)
    framed = to_frame(keys, frame["centre"], frame["keys_to"], frame["power"])
    codes = encode_keys(framed.z, SUBSPACE_DIM, None)
    query = queries_to_frame(heads, frame["centre"], frame["queries_to"], frame["weights"])
    linear = linear_table(query.rotated, SUBSPACE_DIM)
    rotated = rotate_group_mean(heads, SEED)
    table = tier_table(rotated, codes.counts, lengths, COLLIDING)
    votes = collide_scaled(codes.signs, linear, lengths, framed.norms)
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
        frame=frame,
        framed=framed,
        codes=codes,
        query=query,
        linear=linear,
        rotated=rotated,
        table=table,
        votes=votes,
        candidates=candidates,
        scores=estimate_scores(rotated, codes.codes, codes.weights, candidates),
    )


def _any_frame(settings: Settings, device: torch.device) -> Tensors:
    """A frame that neither centres nor stretches; the time does not depend on what is in it."""
    from pariskv_kernels.srht import padded_dim
    from pariskv_kernels.srht.naive import rotation_matrix

    rows, dim = (settings.batch, settings.kv_heads), settings.head_dim
    turn = rotation_matrix(dim, padded_dim(dim), SEED, device).float().expand(*rows, -1, -1).contiguous()
    return {
        "centre": torch.zeros(*rows, dim, device=device),
        "keys_to": turn,
        "queries_to": turn.clone(),
        "power": torch.full(rows, float(turn.shape[-1] * dim), device=device),
        "weights": torch.ones(*rows, settings.group, device=device),
    }


def kernels(top_ks: tuple[int, ...]) -> list[Kernel]:
    """The kernels in the order of a step, after those that encode; the last two once for each top_k."""
    from pariskv_kernels.collide import collide, collide_scaled
    from pariskv_kernels.combine import combine_estimates
    from pariskv_kernels.encode import encode_keys
    from pariskv_kernels.frame import queries_to_frame, to_frame
    from pariskv_kernels.linear import linear_table
    from pariskv_kernels.rerank import estimate_scores
    from pariskv_kernels.select import select_by_votes
    from pariskv_kernels.srht import rotate_group_mean
    from pariskv_kernels.tiers import tier_table
    from pariskv_plugins.paris.paper import COLLIDING

    def rerank(one: Inputs) -> Tensor:
        codes, scaling = (one.codes.codes, one.codes.weights, one.candidates), one.heads.shape[-1] ** -0.5
        steady = one.query.offset  # zeros
        return combine_estimates(one.query.heads, *codes, one.query.offset, steady, "sum_softmax", scaling)[0]

    return [
        Kernel(
            "to frame",
            lambda one: to_frame(one.keys, one.frame["centre"], one.frame["keys_to"], one.frame["power"]),
            lambda one: _bytes(one.keys, *one.framed, one.frame["keys_to"]),
        ),
        Kernel(
            "encode",
            lambda one: encode_keys(one.framed.z, SUBSPACE_DIM, None),
            lambda one: _bytes(one.framed.z, *one.codes),
        ),
        Kernel(
            "query to frame",
            lambda one: queries_to_frame(one.heads, one.frame["centre"], one.frame["queries_to"], one.frame["weights"]),
            lambda one: _bytes(one.heads, *one.query, one.frame["queries_to"]),
        ),
        Kernel(
            "linear table",
            lambda one: linear_table(one.query.rotated, SUBSPACE_DIM),
            lambda one: _bytes(one.query.rotated, one.linear),
        ),
        Kernel(
            "collide",
            lambda one: collide_scaled(one.codes.signs, one.linear, one.lengths, one.framed.norms),
            lambda one: _bytes(one.codes.signs, one.framed.norms, one.linear, *one.votes),
        ),
        Kernel(
            "select votes",
            lambda one: select_by_votes(one.votes, one.count, one.lengths, one.width),
            lambda one: _bytes(*one.votes, one.candidates),
        ),
        Kernel("rerank", rerank, lambda one: _candidate_bytes(one) + _bytes(one.candidates, one.scores)),
        Kernel(
            "rotate query (paper)",
            lambda one: rotate_group_mean(one.heads, SEED),
            lambda one: _bytes(one.heads, one.rotated),
        ),
        Kernel(
            "tier table (paper)",
            lambda one: tier_table(one.rotated, one.codes.counts, one.lengths, COLLIDING),
            lambda one: _bytes(one.rotated, one.codes.counts, one.table),
        ),
        Kernel(
            "collide (paper)",
            lambda one: collide(one.codes.signs, one.table, one.lengths),
            lambda one: _bytes(one.codes.signs, one.table, one.votes.votes),
        ),
        Kernel(
            "rerank (paper)",
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
