"""`square_roots` by matrix products alone: the Newton-Schulz iteration, scaled.

With Y = M and Z = 1 the steps T = (3 - Z Y) / 2, Y <- Y T, Z <- T Z bring Y to M^1/2 and Z to M^-1/2, where the
eigenvalues of M are in (0, 1]. Those of Z Y, squares of an x, go to 1 as x <- x (3 - x^2) / 2 does: quadratically in
the end, but at first a small x only grows by half. Where all x are known to be in [l, 1], x scaled by
mu = (3 / (1 + l + l^2))^1/2 grows by 2.6, and the images of l and 1, between which all others are, are one number.

Sources: N. J. Higham, Functions of Matrices, chapter 6.7 (the iteration, which is stable in this form); J. Chen,
E. Chow, A stable scaling of Newton-Schulz for improving the sign function computation of a Hermitian matrix (2014).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

LEAST = 2.0**-34
"""The smallest eigenvalue, as a share of a bound of the largest, that is brought to its root.

A frame asks for less: two moments with a ridge of 3 % of their mean have a condition of (256 / 0.03)^2 = 7e7 together
where D is 256, and the bound, the norm, is 16 times the largest eigenvalue at most.
"""

CLOSE = 1e-14
"""What is left of 1 - x where the steps end: they square it, and float64 has no more."""


def square_roots(matrices: Tensor) -> tuple[Tensor, Tensor]:
    bound = matrices.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    root = matrices / bound
    inverse = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
    identity = inverse
    for scale in _scales():
        step = torch.baddbmm(identity, inverse, root, beta=1.5 * scale, alpha=-0.5 * scale**3)
        root, inverse = torch.bmm(root, step), torch.bmm(step, inverse)
    return root * bound.sqrt(), inverse / bound.sqrt()


@lru_cache
def _scales() -> tuple[float, ...]:
    """mu of every step: as long as l is small the scaled one, then 1."""
    scales, least = [], math.sqrt(LEAST)
    while 1 - least > CLOSE:
        scale = math.sqrt(3 / (1 + least + least**2)) if least < 0.9 else 1.0
        scales.append(scale)
        least = scale * least * (3 - (scale * least) ** 2) / 2
    return tuple(scales)
