"""Have Numba work out the types of every CUDA kernel, as it does before it compiles one; needs neither GPU nor toolkit.

    NUMBA_ENABLE_CUDASIM=0 python tests/kernels/cuda/type_kernels.py

The simulator runs kernels as Python, which has no types to get wrong. Prints a line for each kernel, and what is wrong
with it; exit code 1 where something is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numba
import torch
from numba import cuda
from numba.core import types
from numba.cuda import compiler, dispatcher
from pariskv_kernels.collide.naive import Votes
from pariskv_kernels.launch import BITS
from pariskv_kernels.rest import Known, Weighed
from pariskv_kernels.specialise import Template
from torch import Tensor

MODULES = [
    f"pariskv_kernels.{name}"
    for name in (
        "append.cuda", "attend.cuda", "collide.cuda", "combine.cuda", "encode.cuda", "frame.cuda", "gather.cuda",
        "linear.cuda", "rerank.cuda", "rerank.cuda_group", "rest.cuda", "select.cuda", "select.cuda_scores",
        "srht.cuda", "tiers.cuda",
    )
]  # fmt: skip

HOPPER = (9, 0)
B, H, G, D, N, C, K, S = 2, 2, 3, 64, 128, 40, 8, 8


class Device:
    """What Numba asks of a GPU before it compiles for it."""

    compute_capability = HOPPER


def calls() -> list[tuple[Any, ...]]:
    """(module, launcher, arguments): every kernel, in each of its kinds."""
    halves, lengths = torch.zeros(B, H, N, D, dtype=torch.bfloat16), integers(B)
    centre, matrix = torch.zeros(B, H, D), torch.zeros(B, H, D, D)
    signs, norms, table = byte(B, H, S, N), byte(B, H, N), byte(B, H, S, 256)
    histogram, indices = integers(B, H, 256), integers(B, H, C)
    codes, weights = byte(B, H, N, D // 2), torch.zeros(B, H, N, S, dtype=torch.float16)
    group, offset = torch.zeros(B, H, G, D), torch.zeros(B, H, G)
    rows, slots = torch.zeros(B, H, N, 2, D), torch.zeros(B, H, K, 2, D)
    flags, row_flags = torch.ones(B, N, dtype=torch.bool), torch.ones(B, dtype=torch.bool)
    products = torch.zeros(B, H, G, C)
    found: list[tuple[Any, ...]] = [
        ("collide.cuda", "collide", signs, table, lengths, 6),
        ("collide.cuda", "collide", signs[..., :63].contiguous(), table, lengths, 6),
        ("collide.cuda", "collide", signs, table, lengths, 40),
        ("collide.cuda", "collide_scaled", signs, table, lengths, norms, 30),
        ("collide.cuda", "collide_scaled", signs, table, lengths, None, 30),
        ("linear.cuda", "linear_table", centre, 8),
        ("linear.cuda", "linear_table", centre, 4),
        ("tiers.cuda", "tier_table", centre, integers(B, H, S, 256), lengths, ((0, 100), (9, 50))),
        ("select.cuda", "select_by_votes", Votes(norms, histogram), lengths, lengths, K),
        ("select.cuda_scores", "select_by_scores", torch.zeros(B, H, C), indices, K, None),
        ("select.cuda_scores", "select_by_scores", torch.zeros(B, H, 20_000), integers(B, H, 20_000), K, lengths),
        ("rerank.cuda", "estimate_scores", centre, codes, weights, indices),
        ("rerank.cuda_group", "estimate_scores_by_head", group, codes, weights, indices),
        ("rerank.cuda_group", "estimate_and_sum", group, codes, weights, indices, offset, 0.1, None),
        ("rerank.cuda_group", "estimate_and_sum", group, codes, weights, indices, offset, 0.1, 3.0),
        ("rest.cuda", "estimate_rest", Weighed(offset, offset, group), torch.zeros(B, H, G, 4, 3), centre),
        ("gather.cuda", "gather_rows", rows, integers(B, H, K), slots),
        ("gather.cuda", "gather_changed", rows, integers(B, H, K), integers(B, H, K), slots, torch.zeros(2).long()),
        ("srht.cuda", "rotate_group_mean", group, D, 42),
        ("encode.cuda", "encode_keys", torch.zeros(B, H, N, D), 4, None),
    ]
    for how in ("max_logit", "sum_softmax", "max_softmax"):
        found += [("combine.cuda", "combine_scores", products, offset, offset, how, 0.1, cap) for cap in (None, 3.0)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        heads, keys, held = group.to(dtype), halves.to(dtype), rows.to(dtype)
        token = keys[:, :, :1].contiguous()
        chosen, bias = torch.ones(B, H, K, dtype=torch.bool), torch.zeros(B, H, G, K)
        steady, sums = flags[:, : N - K].contiguous(), torch.zeros(B, H, G, 4, 3)
        found += [
            ("encode.cuda", "encode_keys", keys, 8, 42),
            ("frame.cuda", "to_frame", keys, centre, matrix, torch.ones(B, H)),
            ("frame.cuda", "queries_to_frame", heads, centre, matrix, offset),
            ("append.cuda", "append_token", token, token, held, flags, torch.zeros(B).long(), row_flags, 4),
            ("attend.cuda", "attend_rows", heads, held, steady, chosen, None, 0.1),
            ("attend.cuda", "attend_rows", heads, held, steady, chosen, None, 0.1, None, lambda: (group, offset)),
            ("attend.cuda", "attend_rows", heads, held, steady, chosen, bias, 0.1, 30.0),
            ("rest.cuda", "weigh_candidates", heads, sums, Known(lengths, offset, matrix), 0.1),
            ("rest.cuda", "weigh_candidates", heads, sums, Known(lengths, None, matrix), 0.1),
        ]
    return found


def byte(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def integers(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)


def type_of(argument: Any) -> Any:
    """The type that Numba gives an argument of a launch."""
    if not isinstance(argument, Tensor):
        return numba.typeof(argument)
    bits = argument.view(BITS.get(argument.dtype, argument.dtype))
    return numba.typeof((bits.view(torch.uint8) if bits.dtype == torch.bool else bits).numpy())


def main() -> int:
    seen: dict[str, str] = {}

    def launch(kernel: Any, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        function, wrong = kernel.py_func, ""
        if function.__name__ not in seen:
            try:
                compiler.compile_cuda(function, types.void, tuple(map(type_of, arguments)), cc=HOPPER)
            except numba.core.errors.NumbaError as error:
                wrong = str(error)
            seen[function.__name__] = wrong
            print(f"{'WRONG' if wrong else 'ok   '} {function.__name__} {wrong}", flush=True)

    for module in (cuda, compiler, dispatcher):
        module.get_current_device = Device
    templates = set()
    for name in MODULES:
        module = importlib.import_module(name)
        module.launch = launch
        templates |= {one.function.__name__ for one in vars(module).values() if isinstance(one, Template)}
    for file, launcher, *arguments in calls():
        function: Callable[..., object] = getattr(importlib.import_module(f"pariskv_kernels.{file}"), launcher)
        function(*arguments)
    missing = {name for name in templates if not any(one.startswith(f"{name}_") for one in seen)}
    for name in sorted(missing):
        print(f"MISSING {name}: no call of this script launches it")
    return bool(missing or any(seen.values()))


if __name__ == "__main__":
    sys.exit(main())
