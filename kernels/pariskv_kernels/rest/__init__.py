"""Attention to the tokens that were not chosen, estimated: what it would weigh, and what it would find there."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.rest import naive
from pariskv_kernels.rest.naive import LEAST, Known, Rest

__all__ = ["LEAST", "Known", "Rest", "estimate_rest"]

WIDEST = 256
"""The largest head size that the kernel takes; a larger one, and float64, stay on the definition."""


def estimate_rest(heads: Tensor, candidates: Tensor, chosen: Tensor, known: Known, scaling: float) -> Rest:
    """The attention that is missing where only some of the candidates are attended: `out` and `lse`, see `Rest`.

    heads       [B, H, G, D]         a step's queries q, of any floating-point dtype; the arithmetic is float32
    candidates  [B, H, G, parts, 3]  float32, `sum_estimates` of all candidates
    chosen      [B, H, G, parts, 3]  float32, the same of those that were chosen, in as many parts as it likes
    known       what is known of the zone, `Known`

    Two estimates are added up:

    - The candidates that were not chosen weigh the difference of the two sums, nothing where that is below `LEAST` of
      the first: rounding leaves that much. Their values are those that are jointly normal with the keys, under the
      weights exp(scaling q.k): mean + scaling q @ slopes.
    - The tokens that are no candidates weigh what they do if the scores are normal and the candidates the highest of
      them. The mean of the scores is known; their standard deviation is that at which the candidates weigh what they
      do. But never more than the candidates that were not chosen: so rough a guess may not outweigh what is known.
      Their value is the mean.

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("heads", heads)
    check_shape("heads", heads, None, None, None, None)
    batch, num_heads, group, dim = heads.shape
    check_dtype("known.length", known.length, torch.int32)
    check_shape("known.length", known.length, batch)
    sizes: list[tuple[str, Tensor | None, tuple[int | None, ...]]] = [
        ("candidates", candidates, (group, None, 3)),
        ("chosen", chosen, (group, None, 3)),
        ("known.offset", known.offset, (group,)),
        ("known.mean", known.mean, (dim,)),
        ("known.slopes", known.slopes, (dim, dim)),
    ]
    for name, tensor, size in sizes:
        if tensor is not None:
            check_dtype(name, tensor, torch.float32)
            check_shape(name, tensor, batch, num_heads, *size)
    if heads.element_size() < 8 and dim <= WIDEST and is_on_gpu(heads, candidates, chosen, known.slopes):
        from pariskv_kernels.rest import cuda

        return cuda.estimate_rest(heads, candidates, chosen, known, scaling)
    return naive.estimate_rest(heads, candidates, chosen, known, scaling)
