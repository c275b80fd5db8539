"""Square roots of symmetric positive definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv_kernels.checks import check_dtype, check_shape
from pariskv_kernels.root import naive, newton_schulz

__all__ = ["matrix_powers", "square_roots"]

matrix_powers = naive.matrix_powers


def square_roots(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """M^1/2 and M^-1/2 [N, D, D] of symmetric positive definite matrices M [N, D, D], float64.

    A GPU multiplies its way there, for its eigendecompositions are slow, and make the host wait. Of matrices whose
    condition is beyond 1 / `newton_schulz.LEAST` that is not exact in the smallest eigenvalues.

    Raises TypeError or ValueError naming the argument. `naive.py` is the definition.
    """
    check_dtype("matrices", matrices, torch.float64)
    check_shape("matrices", matrices, None, matrices.shape[-1], matrices.shape[-1])
    if matrices.is_cuda:
        return newton_schulz.square_roots(matrices)
    return naive.square_roots(matrices)
