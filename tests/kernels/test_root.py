"""Square roots of matrices, however they are found."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.root import matrix_powers, naive, newton_schulz, square_roots
from torch import Tensor


def matrices(size: int, condition: float, count: int = 3) -> Tensor:
    """Symmetric matrices whose eigenvalues are spread from 1 to `condition`, of different size."""
    random = torch.randn(count, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    vectors, _ = torch.linalg.qr(random)
    values = torch.logspace(0, torch.tensor(condition).log10(), size, dtype=torch.float64)
    scale = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)[:count].view(-1, 1, 1)
    return (vectors * values) @ vectors.mT * scale


@pytest.mark.parametrize("find", [naive.square_roots, newton_schulz.square_roots])
@pytest.mark.parametrize(("size", "condition"), [(1, 1.0), (4, 1.0), (16, 10.0), (80, 1e4), (128, 1e7)])
def test_a_root_squared_is_the_matrix_and_its_inverse_the_inverse(find: object, size: int, condition: float) -> None:
    given = matrices(size, condition)
    root, inverse = find(given)  # type: ignore[operator]
    norm = given.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(root @ root / norm, given / norm, rtol=0, atol=1e-9)
    identity = torch.eye(size, dtype=torch.float64).expand_as(given)
    torch.testing.assert_close(root @ inverse, identity, rtol=0, atol=1e-7)
    torch.testing.assert_close(root, root.mT, rtol=0, atol=1e-9 * float(root.abs().max()))
    assert bool((torch.linalg.eigvalsh(root) > 0).all())


def test_products_find_what_the_definition_says_down_to_the_worst_condition_of_two_ridged_moments() -> None:
    given = matrices(256, 7e7)
    for got, wanted in zip(newton_schulz.square_roots(given), naive.square_roots(given), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))


def test_few_steps_are_enough() -> None:
    assert len(newton_schulz._scales()) <= 20


def test_powers_are_those_of_the_eigenvalues() -> None:
    given = matrices(16, 100.0)
    power, inverse = matrix_powers(given, 0.25)
    torch.testing.assert_close(power @ power @ power @ power, given)
    torch.testing.assert_close(power @ inverse, torch.eye(16, dtype=torch.float64).expand_as(given))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"matrices: wanted dtype torch\.float64"):
        square_roots(torch.eye(3).unsqueeze(0))
    with pytest.raises(ValueError, match="matrices: wanted shape"):
        square_roots(torch.zeros(1, 3, 4, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("size", "condition"), [(64, 1e4), (128, 1e7), (256, 7e7)])
def test_a_gpu_finds_the_same(size: int, condition: float) -> None:
    given = matrices(size, condition)
    for got, wanted in zip(square_roots(given.cuda()), naive.square_roots(given), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
