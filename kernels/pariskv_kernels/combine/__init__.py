"""Scores of a group's query heads as one ranking of the candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.combine import naive
from pariskv_kernels.combine.naive import COMBINE
from pariskv_kernels.cpu import is_compiled_for
from pariskv_kernels.launch import is_on_gpu
from pariskv_kernels.rerank import check_estimates, estimate_scores_by_head, runs_on_gpu

__all__ = ["COMBINE", "combine_estimates", "combine_scores", "sum_estimates"]


def combine_scores(
    products: Tensor, offset: Tensor, steady: Tensor, how: str, scaling: float, softcap: float | None = None
) -> Tensor:
    """One score for each candidate from the inner products of a group's heads with it.

    products  [B, H, G, C]  float32, -inf where empty
    offset    [B, H, G]     float32, added to a head's products first
    steady    [B, H, G]     float32, log-sum-exp of what the head attends to in any case; -inf: nothing
    how       max_logit: the highest score of any head. sum_softmax, max_softmax: the logarithm of the sum, or of the
              highest, of the heads' probabilities over the candidates and what is steady
    returns   [B, H, C]     float32, -inf where empty

    A score is scaling x (product + offset), then soft-capped. Raises TypeError or ValueError naming the argument.
    `naive.py` is the definition.
    """
    check_dtype("products", products, torch.float32)
    check_shape("products", products, None, None, None, None)
    _check(offset, steady, how, products.shape[:3])
    if is_compiled_for(products, offset, steady):
        from pariskv_kernels.combine import cpu

        return cpu.combine_scores(products, offset, steady, how, scaling, softcap)
    if is_on_gpu(products, offset, steady):
        from pariskv_kernels.combine import cuda

        return cuda.combine_scores(products, offset, steady, how, scaling, softcap)
    return naive.combine_scores(products, offset, steady, how, scaling, softcap)


def combine_estimates(
    rotated: Tensor,
    codes: Tensor,
    weights: Tensor,
    indices: Tensor,
    offset: Tensor,
    steady: Tensor,
    how: str,
    scaling: float,
    softcap: float | None = None,
    with_sums: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`combine_scores` of what `estimate_scores_by_head` gives, with their arguments; a GPU sums while it estimates.

    rotated [B, H, G, P], codes [B, H, N, P / 2], weights [B, H, N, S], indices [B, H, C]
    returns [B, H, C], and what `sum_estimates` returns; None where the sums are not wanted and not had anyway
    """
    _check(offset, steady, how, rotated.shape[:3])
    wants_them = with_sums or how != "max_logit"
    if wants_them and _sums_on_gpu(rotated, codes, weights, indices, offset, steady):
        from pariskv_kernels.combine.cuda import combine_by_sums
        from pariskv_kernels.rerank.cuda_group import estimate_and_sum

        products, sums = estimate_and_sum(rotated, codes, weights, indices, offset, scaling, softcap)
        return combine_by_sums(products, offset, steady, sums, how, scaling, softcap), sums
    products = estimate_scores_by_head(rotated, codes, weights, indices)
    scores = combine_scores(products, offset, steady, how, scaling, softcap)
    return scores, _sum_products(products, offset, scaling, softcap) if with_sums else None


def sum_estimates(
    rotated: Tensor,
    codes: Tensor,
    weights: Tensor,
    indices: Tensor,
    offset: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """How much attention each head is estimated to pay to the tokens, in parts [B, H, G, parts, 3] float32.

    Of the scores of each part, which `combine_scores` defines: the highest, -inf of none, the sum of
    exp(score - highest), 0 of none, and how many there are. Into how many parts the tokens are cut is left open.
    """
    check_shape("offset", offset, *rotated.shape[:3])
    if _sums_on_gpu(rotated, codes, weights, indices, offset):
        from pariskv_kernels.rerank.cuda_group import estimate_and_sum

        return estimate_and_sum(rotated, codes, weights, indices, offset, scaling, softcap)[1]
    products = estimate_scores_by_head(rotated, codes, weights, indices)
    return _sum_products(products, offset, scaling, softcap)


def _sum_products(products: Tensor, offset: Tensor, scaling: float, softcap: float | None) -> Tensor:
    if is_compiled_for(products, offset):
        from pariskv_kernels.combine import cpu

        return cpu.sum_products(products, offset, scaling, softcap)
    return naive.sum_products(products, offset, scaling, softcap)


def _sums_on_gpu(rotated: Tensor, codes: Tensor, weights: Tensor, indices: Tensor, *others: Tensor) -> bool:
    """The kernel is there for it; its arguments have been checked then."""
    if not indices.shape[-1] or not runs_on_gpu(rotated, codes, weights, indices, *others):
        return False
    check_estimates(rotated, codes, weights, indices, by_head=True)
    return True


def _check(offset: Tensor, steady: Tensor, how: str, shape: Sequence[int]) -> None:
    """shape: B, H and G"""
    for name, tensor in (("offset", offset), ("steady", steady)):
        check_dtype(name, tensor, torch.float32)
        check_shape(name, tensor, *shape)
    if how not in COMBINE:
        raise ValueError(f"how: wanted one of {', '.join(COMBINE)}, got {how!r}")
