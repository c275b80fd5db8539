"""The rotation: exact inner products, the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from pariskv_kernels.srht import padded_dim, rotate
from pariskv_kernels.srht.naive import random_signs
from pariskv_kernels.tree import tree_sum

DIMS = [1, 3, 64, 80, 96, 128, 256]


def hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@pytest.mark.parametrize(
    ("dim", "padded"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (80, 128), (96, 128), (256, 256)]
)
def test_a_head_is_padded_to_the_next_power_of_two(dim: int, padded: int) -> None:
    assert padded_dim(dim) == padded
    assert rotate(torch.ones(2, dim)).shape == (2, padded)


@pytest.mark.parametrize("dim", DIMS)
def test_rotate_is_the_hadamard_matrix_times_the_signs(dim: int) -> None:
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(0))
    signed = torch.nn.functional.pad(x * random_signs(dim, 42, x.device), (0, padded_dim(dim) - dim)).double()
    wanted = signed @ hadamard(padded_dim(dim)).T
    # float32 rounding of sums of up to 256 terms of size 1
    torch.testing.assert_close(rotate(x).double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dim", DIMS)
def test_inner_products_are_kept_up_to_the_factor(dim: int) -> None:
    q, k = torch.randn(2, 7, dim, generator=torch.Generator().manual_seed(1))
    got = (rotate(q) * rotate(k)).sum(-1) / padded_dim(dim)
    torch.testing.assert_close(got, (q * k).sum(-1), rtol=0, atol=1e-4)  # float32 rounding


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 63, 65])
def test_every_row_has_the_same_bits_in_any_batch(dim: int, rows: int) -> None:
    x = torch.randn(2, 3, 130, dim, generator=torch.Generator().manual_seed(2))
    whole = rotate(x)
    for start in range(0, 130, rows):
        assert torch.equal(rotate(x[:, :, start : start + rows]), whole[:, :, start : start + rows])
    assert torch.equal(rotate(x[1, 2, 3]), whole[1, 2, 3])


def test_strides_and_dtypes_do_not_matter() -> None:
    x = torch.randn(2, 9, 3, 64, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    assert torch.equal(rotate(x), rotate(x.contiguous()))
    assert torch.equal(rotate(x.bfloat16()), rotate(x.bfloat16().float()))
    assert torch.equal(rotate(x.double()), rotate(x))  # computed in float32


def test_the_signs_are_fixed_by_the_seed() -> None:
    one, other = (random_signs(128, seed, torch.device("cpu")) for seed in (42, 43))
    assert set(one.tolist()) == {-1.0, 1.0}
    assert not torch.equal(one, other)
    # The first bits of torch's generator: saved codes stay readable only while these stay.
    assert torch.equal(one[:8], SIGNS_OF_42)


SIGNS_OF_42 = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0, -1.0])


def test_what_cannot_be_rotated_is_named() -> None:
    with pytest.raises(TypeError, match=r"^x: wanted a floating-point dtype, got torch.int32"):
        rotate(torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^x: wanted vectors"):
        rotate(torch.ones(3, 0))


def test_tree_sum_adds_halves_and_refuses_other_sizes() -> None:
    x = torch.arange(24).view(2, 4, 3)
    assert torch.equal(tree_sum(x, 1), x.sum(1))
    with pytest.raises(ValueError, match="power of two"):
        tree_sum(x, 2)
