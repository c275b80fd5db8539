"""Codes of keys against a definition in float64 without any trick."""

from __future__ import annotations

import math

import pytest
import torch
from pariskv_kernels.encode import KeyCodes, encode_keys
from pariskv_kernels.encode import naive as encode_naive
from pariskv_kernels.quantizer import level_table, lloyd_max
from pariskv_kernels.srht import rotate
from torch import Tensor

SHAPES = [(64, 8), (80, 8), (96, 4), (128, 8), (128, 4), (256, 8)]


def random_keys(n: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    keys = torch.randn(2, 3, n, dim, generator=torch.Generator().manual_seed(n + dim))
    return (keys * 3 + 1).to(dtype)


def blocks(keys: Tensor, m: int) -> Tensor:
    """Rotated and normalised keys in float64, [B, H, n, S, m]."""
    z = rotate(keys).double()
    return (z / math.sqrt(z.shape[-1])).reshape(*z.shape[:-1], -1, m)


def unpacked(codes: Tensor, m: int) -> Tensor:
    """4-bit codes [B, H, n, S, m]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).reshape(*codes.shape[:-1], -1, m)


@pytest.mark.parametrize(("dim", "m"), SHAPES)
@pytest.mark.parametrize("n", [1, 63, 65])
def test_every_field_is_what_the_paper_defines(dim: int, m: int, n: int) -> None:
    keys = random_keys(n, dim)
    got, z = encode_keys(keys, m), blocks(keys, m)
    negative = z < 0
    assert torch.equal(
        got.signs.transpose(2, 3).int(), (negative.int() << torch.arange(m).int()).sum(-1, dtype=torch.int32)
    )

    radius = z.norm(dim=-1)
    u = (z / radius.unsqueeze(-1)).abs().contiguous()
    code = unpacked(got.codes, m)
    assert torch.equal(code >> 3, negative.to(torch.uint8))
    thresholds = torch.tensor(lloyd_max(m).thresholds, dtype=torch.float64)
    magnitude = code.long() & 7
    # float32 against float64: a coordinate on a threshold may fall to either side
    on_threshold = ((u.unsqueeze(-1) - thresholds).abs() < 1e-6).any(-1)
    assert bool(((magnitude == torch.bucketize(u, thresholds)) | on_threshold).all())

    levels = torch.tensor(lloyd_max(m).levels, dtype=torch.float64)
    weights = radius / (levels[magnitude] * u).sum(-1)
    torch.testing.assert_close(got.weights.double(), weights, rtol=1e-3, atol=0)  # float16 has 11 bits

    counts = torch.zeros(*z.shape[:2], z.shape[3], 1 << m, dtype=torch.int32)
    for b, h, s in ((b, h, s) for b in range(2) for h in range(3) for s in range(z.shape[3])):
        counts[b, h, s] = torch.bincount(got.signs[b, h, s], minlength=1 << m)
    assert torch.equal(got.counts, counts)


@pytest.mark.parametrize(("dim", "m"), SHAPES)
def test_shapes_and_dtypes_are_those_of_the_format(dim: int, m: int) -> None:
    got = encode_keys(random_keys(5, dim, torch.bfloat16), m)
    padded = rotate(torch.ones(dim)).shape[0]
    subspaces = padded // m
    shapes = [tuple(field.shape) for field in got]
    assert shapes == [(2, 3, subspaces, 5), (2, 3, 5, padded // 2), (2, 3, 5, subspaces), (2, 3, subspaces, 1 << m)]
    assert [field.dtype for field in got] == [torch.uint8, torch.uint8, torch.float16, torch.int32]
    assert all(field.is_contiguous() for field in got)


def joined(parts: list[KeyCodes]) -> KeyCodes:
    signs, codes, weights, counts = zip(*parts, strict=True)
    return KeyCodes(torch.cat(signs, 3), torch.cat(codes, 2), torch.cat(weights, 2), torch.stack(counts).sum(0).int())


@pytest.mark.parametrize(("dim", "m"), SHAPES)
@pytest.mark.parametrize("step", [1, 7, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_split_gives_the_same_bits(dim: int, m: int, step: int, dtype: torch.dtype) -> None:
    keys = random_keys(130, dim, dtype)
    whole = encode_keys(keys, m)
    parts = joined([encode_keys(keys[:, :, start : start + step], m) for start in range(0, 130, step)])
    row = encode_keys(keys[1:, 2:], m)
    for name in KeyCodes._fields:
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
        assert torch.equal(getattr(whole, name)[1:, 2:], getattr(row, name)), name


def test_long_blocks_are_encoded_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = random_keys(1000, 64)
    whole = encode_keys(keys, 8)
    monkeypatch.setattr(encode_naive, "TOKENS_AT_ONCE", 333)
    for one, other in zip(whole, encode_keys(keys, 8), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_strides_do_not_matter() -> None:
    keys = random_keys(33, 80).transpose(1, 2).contiguous().transpose(1, 2)
    assert not keys.is_contiguous()
    for one, other in zip(encode_keys(keys, 8), encode_keys(keys.contiguous(), 8), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("m", [4, 8])
def test_zero_keys_get_weight_zero(m: int) -> None:
    keys = random_keys(3, 64)
    keys[:, :, 1] = 0
    got = encode_keys(keys, m)
    assert torch.equal(got.weights[:, :, 1], torch.zeros(2, 3, 64 // m, dtype=torch.float16))
    assert bool((got.weights[:, :, [0, 2]] > 0).all())


def test_a_zero_block_of_a_key_gets_weight_zero() -> None:
    z = torch.zeros(64)
    z[:8] = torch.randn(8, generator=torch.Generator().manual_seed(0))
    # Rotating twice undoes the Hadamard matrix but for the signs, so this key has one block that is not zero.
    key = rotate(z * rotate_signs(64)) * rotate_signs(64)
    got = encode_keys(key.view(1, 1, 1, 64), 8)
    assert float(got.weights[..., 0]) > 0
    assert float(got.weights[..., 1:].abs().max()) < 1e-3  # rounding leaves next to nothing


def rotate_signs(dim: int) -> Tensor:
    return rotate(torch.eye(dim))[:, 0]


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e18, 1e30])
def test_weights_are_finite_whatever_the_size(size: float) -> None:
    got = encode_keys(random_keys(5, 128) * size, 8)
    assert bool(got.weights.isfinite().all())
    assert bool((got.weights >= 0).all())


@pytest.mark.parametrize("m", [4, 8])
def test_the_codes_give_the_keys_back_but_for_the_quantisation(m: int) -> None:
    keys = random_keys(200, 128)
    got, z = encode_keys(keys, m), blocks(keys, m)
    decoded = level_table(m, keys.device)[unpacked(got.codes, m).long()] * got.weights.unsqueeze(-1).float()
    error = (decoded - z).square().sum() / z.square().sum()
    assert float(error) < 1.2 * m * lloyd_max(m).mse  # the weight trades a little error for no bias


def test_no_tokens_give_no_codes() -> None:
    got = encode_keys(torch.empty(2, 3, 0, 64), 8)
    assert got.signs.shape == (2, 3, 8, 0)
    assert int(got.counts.sum()) == 0


def test_what_cannot_be_encoded_is_named() -> None:
    keys = torch.randn(1, 1, 2, 64)
    with pytest.raises(TypeError, match=r"^keys: wanted a floating-point dtype"):
        encode_keys(keys.int(), 8)
    with pytest.raises(ValueError, match=r"^keys: wanted shape \[\*, \*, \*, \*\], got \[1, 2, 64\]"):
        encode_keys(keys[0], 8)
    with pytest.raises(ValueError, match=r"^subspace_dim: wanted 4 or 8, got 16"):
        encode_keys(keys, 16)
    with pytest.raises(ValueError, match=r"^keys: wanted heads of more than 4 coordinates, got 4"):
        encode_keys(keys[..., :4], 8)
