"""Attention to the tokens that were not chosen, estimated: what it would weigh, and what it would find there.

In two steps, for most of it needs only the candidates and can be done while the best of them are looked for:

    weigh_candidates   what all candidates weigh, what lies beyond them, and what a head would find there
    estimate_rest      the chosen ones taken off
"""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_float, check_shape
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.rest import naive
from pariskv_kernels.rest.naive import LEAST, Known, Rest, Weighed

__all__ = ["LEAST", "Known", "Rest", "Weighed", "estimate_rest", "weigh_candidates"]

WIDEST = 256
"""The largest head size that the kernels take; a larger one, and float64, stay on the definition."""


def weigh_candidates(heads: Tensor, candidates: Tensor, known: Known, scaling: float) -> Weighed:
    """What the candidates and the tokens beyond them weigh, and what each head would find there: `Weighed`.

    heads       [B, H, G, D]         a step's queries q, of any floating-point dtype; the arithmetic is float32
    candidates  [B, H, G, parts, 3]  float32, `sum_estimates` of all candidates
    known       what is known of the zone, `Known`

    - The values of candidates are those that are jointly normal with the keys, under the weights exp(scaling q.k):
      their mean and scaling q @ slopes, the shift.
    - The tokens that are no candidates weigh what they do if the scores are normal and the candidates the highest of
      them. The mean of the scores is known; their standard deviation is that at which the candidates weigh what they
      do.

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_float("heads", heads)
    check_shape("heads", heads, None, None, None, None)
    batch, num_heads, group, dim = heads.shape
    check_dtype("known.length", known.length, torch.int32)
    check_shape("known.length", known.length, batch)
    _check("candidates", candidates, batch, num_heads, group, None, 3)
    _check("known.slopes", known.slopes, batch, num_heads, dim, dim)
    if known.offset is not None:
        _check("known.offset", known.offset, batch, num_heads, group)
    if is_compiled_for(heads, candidates, known.slopes):
        from pariskv_kernels.rest import cpu

        return cpu.weigh_candidates(heads, candidates, known, scaling)
    if heads.element_size() < 8 and dim <= WIDEST and is_on_gpu(heads, candidates, known.slopes):
        from pariskv_kernels.rest import cuda

        return cuda.weigh_candidates(heads, candidates, known, scaling)
    return naive.weigh_candidates(heads, candidates, known, scaling)


def estimate_rest(weighed: Weighed, chosen: Tensor, mean: Tensor) -> Rest:
    """The attention that is missing where only the chosen candidates are attended: `out` and `lse`, see `Rest`.

    weighed  what `weigh_candidates` returned
    chosen   [B, H, G, parts, 3]  float32, `sum_estimates` of the candidates that were chosen
    mean     [B, H, D]            float32, the mean value of the zone

    - The candidates that were not chosen weigh the difference of the two sums, nothing where that is below `LEAST` of
      the first: rounding leaves that much. Their value is the mean and the shift.
    - The tokens beyond never weigh more than these: so rough a guess may not outweigh what is known. Their value is
      the mean.

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    batch, num_heads, group, dim = weighed.shift.shape
    _check("weighed.shift", weighed.shift, None, None, None, None)
    for name in ("whole", "beyond"):
        _check(f"weighed.{name}", getattr(weighed, name), batch, num_heads, group)
    _check("chosen", chosen, batch, num_heads, group, None, 3)
    _check("mean", mean, batch, num_heads, dim)
    if is_compiled_for(*weighed, chosen, mean):
        from pariskv_kernels.rest import cpu

        return cpu.estimate_rest(weighed, chosen, mean)
    if is_on_gpu(*weighed, chosen, mean):
        from pariskv_kernels.rest import cuda

        return cuda.estimate_rest(weighed, chosen, mean)
    return naive.estimate_rest(weighed, chosen, mean)


def _check(name: str, tensor: Tensor, *shape: int | None) -> None:
    check_dtype(name, tensor, torch.float32)
    check_shape(name, tensor, *shape)
