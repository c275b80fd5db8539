"""The kernels of the improved retriever on a GPU: frames, linear votes, estimates by head, combined scores."""

from __future__ import annotations

import pytest
import torch
from conftest_cuda import needs_gpu
from pariskv_kernels.collide import cuda as collide_kernel
from pariskv_kernels.collide import naive as collide_naive
from pariskv_kernels.combine import COMBINE
from pariskv_kernels.combine import cuda as combine_kernel
from pariskv_kernels.combine import naive as combine_naive
from pariskv_kernels.encode import cuda as encode_kernel
from pariskv_kernels.encode import naive as encode_naive
from pariskv_kernels.frame import NORM_LEVELS
from pariskv_kernels.frame import cuda as frame_kernel
from pariskv_kernels.frame import naive as frame_naive
from pariskv_kernels.linear import MAX_WEIGHT
from pariskv_kernels.linear import cuda as linear_kernel
from pariskv_kernels.linear import naive as linear_naive
from pariskv_kernels.rerank import cuda_group as rerank_kernel
from pariskv_kernels.rerank import naive as rerank_naive
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_frame(batch: int, heads: int, n: int, dim: int, padded: int, device: torch.device, **how: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys = (3 * torch.randn(batch, heads, n, dim, generator=generator(n)) + 1).to(dtype)
        frame = [
            torch.randn(batch, heads, dim, generator=generator(1)),
            torch.randn(batch, heads, dim, padded, generator=generator(2)),
            torch.rand(batch, heads, generator=generator(3)) * 20 * dim * padded,
        ]
        wanted = frame_naive.to_frame(keys, *frame)
        got = frame_kernel.to_frame(keys.to(device), *(tensor.to(device) for tensor in frame), **how)
        assert torch.equal(got.z.cpu(), wanted.z)
        assert torch.equal(got.norms.cpu(), wanted.norms)
        assert int(wanted.norms.max()) > int(wanted.norms.min()) or n == 1
        for one, other in zip(
            encode_kernel.encode_keys(got.z, 8, None), encode_naive.encode_keys(wanted.z, 8, None), strict=True
        ):
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("n", "dim", "padded"), [(1, 16, 16), (9, 10, 16), (5, 32, 32)])
def test_frames_have_the_bits_of_the_definition(n: int, dim: int, padded: int, device: torch.device) -> None:
    check_frame(1, 2, n, dim, padded, device, tile=4)


@needs_gpu
@pytest.mark.parametrize(("dim", "padded"), [(64, 64), (80, 128), (96, 128), (128, 128), (256, 256)])
def test_frames_have_the_same_bits_at_real_sizes(dim: int, padded: int, device: torch.device) -> None:
    for n in (1, 63, 5000):
        check_frame(2, 3, n, dim, padded, device)


def check_queries(batch: int, heads: int, group: int, dim: int, padded: int, device: torch.device, **how: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        queries = torch.randn(batch, group, heads, dim, generator=generator(dim)).to(dtype).transpose(1, 2)
        frame = [
            torch.randn(batch, heads, dim, generator=generator(1)),
            torch.randn(batch, heads, dim, padded, generator=generator(2)),
            torch.rand(batch, heads, group, generator=generator(3)),
        ]
        wanted = frame_naive.queries_to_frame(queries, *frame)
        got = frame_kernel.queries_to_frame(queries.to(device), *(tensor.to(device) for tensor in frame), **how)
        for name, one, other in zip(wanted._fields, got, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(("group", "dim", "padded"), [(1, 16, 16), (3, 10, 16), (2, 8, 8)])
def test_queries_are_brought_to_the_frame_as_defined(group: int, dim: int, padded: int, device: torch.device) -> None:
    check_queries(1, 2, group, dim, padded, device, columns=8, parts=4)


@needs_gpu
@pytest.mark.parametrize(("dim", "padded"), [(64, 64), (80, 128), (96, 128), (128, 128), (256, 256)])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_queries_at_real_sizes(group: int, dim: int, padded: int, device: torch.device) -> None:
    check_queries(3, 8, group, dim, padded, device)


def check_linear(batch: int, heads: int, padded: int, m: int, device: torch.device) -> None:
    rotated = torch.randn(batch, heads, padded, generator=generator(padded))
    rotated[0, 0] = 0
    got = linear_kernel.linear_table(rotated.to(device), m)
    assert torch.equal(got.cpu(), linear_naive.linear_table(rotated, m))


@pytest.mark.parametrize(("padded", "m"), [(32, 4), (16, 8)])
def test_linear_tables_are_those_of_the_definition(padded: int, m: int, device: torch.device) -> None:
    check_linear(1, 2, padded, m, device)


@needs_gpu
@pytest.mark.parametrize("padded", [64, 128, 256])
@pytest.mark.parametrize("m", [4, 8])
def test_linear_tables_at_real_sizes(padded: int, m: int, device: torch.device) -> None:
    check_linear(4, 8, padded, m, device)


def check_votes(shape: tuple[int, int, int, int], m: int, valid: list[int], device: torch.device, **how: int) -> None:
    batch, heads, _, tokens = shape
    signs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(tokens))
    lengths = torch.tensor(valid, dtype=torch.int32)
    for b, length in enumerate(valid):
        signs[b, :, :, :length] &= (1 << m) - 1
    table = torch.randint(0, MAX_WEIGHT + 1, (*shape[:3], 1 << m), dtype=torch.uint8, generator=generator(m))
    levels = torch.randint(0, NORM_LEVELS, (batch, heads, tokens), dtype=torch.uint8, generator=generator(1))
    for norms in (levels, None):
        wanted = collide_naive.collide_scaled(signs, table, lengths, norms, MAX_WEIGHT)
        given = None if norms is None else norms.to(device)
        got = collide_kernel.collide_scaled(
            signs.to(device), table.to(device), lengths.to(device), given, MAX_WEIGHT, **how
        )
        assert torch.equal(got.histogram.cpu(), wanted.histogram)
        for b, length in enumerate(valid):
            assert torch.equal(got.votes[b, :, :length].cpu(), wanted.votes[b, :, :length])


@pytest.mark.parametrize(("subspaces", "m", "tokens"), [(8, 8, 72), (2, 8, 65), (16, 4, 64)])
def test_scaled_votes_are_those_of_the_definition(subspaces: int, m: int, tokens: int, device: torch.device) -> None:
    check_votes((2, 1, subspaces, tokens), m, [tokens, tokens // 2], device, threads=8)


@needs_gpu
@pytest.mark.parametrize(("subspaces", "m"), [(8, 8), (16, 8), (32, 8), (64, 4)])
@pytest.mark.parametrize("tokens", [1, 1000, 131072, 131071])
def test_scaled_votes_at_real_sizes(subspaces: int, m: int, tokens: int, device: torch.device) -> None:
    check_votes((2, 4, subspaces, tokens), m, [tokens, tokens // 3], device)


def check_by_head(group: int, padded: int, m: int, n: int, num: int, device: torch.device, **how: int) -> None:
    codes = encode_naive.encode_keys(torch.randn(2, 2, n, padded, generator=generator(n)), m, 42)
    rotated = torch.randn(2, 2, group, padded, generator=generator(group))
    indices = torch.randint(-1, n, (2, 2, num), generator=generator(num), dtype=torch.int32)
    wanted = rerank_naive.estimate_scores_by_head(rotated, codes.codes, codes.weights, indices)
    on_device = [tensor.to(device) for tensor in (rotated, codes.codes, codes.weights, indices)]
    got = rerank_kernel.estimate_scores_by_head(*on_device, **how)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("group", "padded", "m", "num"), [(3, 16, 8, 9), (1, 16, 4, 5), (2, 64, 8, 17), (2, 32, 8, 8), (2, 8, 4, 3)]
)
def test_estimates_by_head_are_those_of_the_definition(
    group: int, padded: int, m: int, num: int, device: torch.device
) -> None:
    check_by_head(group, padded, m, 20, num, device, threads=16)


@needs_gpu
@pytest.mark.parametrize(("padded", "m"), [(64, 8), (128, 8), (128, 4), (256, 8)])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_estimates_by_head_at_real_sizes(group: int, padded: int, m: int, device: torch.device) -> None:
    check_by_head(group, padded, m, 3000, 1777, device)


def check_sums(group: int, padded: int, n: int, num: int, device: torch.device, **how: int) -> None:
    """Estimates that are summed on the way are combined as those that are not."""
    codes = encode_naive.encode_keys(torch.randn(2, 2, n, padded, generator=generator(n)), 8, 42)
    rotated = 4 * torch.randn(2, 2, group, padded, generator=generator(group))
    indices = torch.randint(-1, n, (2, 2, num), generator=generator(num), dtype=torch.int32)
    indices[1, 1] = -1
    offset, steady = (5 * torch.randn(2, 2, group, generator=generator(i)) for i in range(2))
    steady[:, 1, 0] = -torch.inf
    given = [tensor.to(device) for tensor in (rotated, codes.codes, codes.weights, indices)]
    products = rerank_naive.estimate_scores_by_head(rotated, codes.codes, codes.weights, indices)
    for name in COMBINE[1:]:
        for softcap in (None, 3.0):
            wanted = combine_naive.combine_scores(products, offset, steady, name, 0.25, softcap)
            got, sums = rerank_kernel.estimate_and_sum(*given, offset.to(device), 0.25, softcap, **how)
            torch.testing.assert_close(got.cpu(), products, rtol=1e-5, atol=1e-5)
            count = sums[..., 2].sum(3).long().cpu()
            assert torch.equal(count, (indices >= 0).sum(2, keepdim=True).expand_as(count))
            rest = offset.to(device), steady.to(device), sums, name, 0.25, softcap
            torch.testing.assert_close(
                combine_kernel.combine_by_sums(got, *rest, **how).cpu(), wanted, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize(("group", "padded", "num"), [(1, 16, 5), (3, 16, 18), (2, 64, 21)])
def test_estimates_are_summed_on_the_way(group: int, padded: int, num: int, device: torch.device) -> None:
    check_sums(group, padded, 20, num, device, threads=32)


@needs_gpu
@pytest.mark.parametrize("padded", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("num", [1, 1777, 100_003])
def test_sums_at_real_sizes(group: int, padded: int, num: int, device: torch.device) -> None:
    check_sums(group, padded, 3000, num, device)


def check_combine(group: int, num: int, device: torch.device, **how: int) -> None:
    products = 40 * torch.randn(2, 2, group, num, generator=generator(num))
    products[:, :, :, ::7] = -torch.inf
    products[1, 1] = -torch.inf
    offset, steady = (5 * torch.randn(2, 2, group, generator=generator(i)) for i in range(2))
    steady[:, 1, 0] = -torch.inf
    for name in COMBINE:
        for softcap in (None, 3.0):
            wanted = combine_naive.combine_scores(products, offset, steady, name, 0.125, softcap)
            given: list[Tensor] = [tensor.to(device) for tensor in (products, offset, steady)]
            got = combine_kernel.combine_scores(*given, name, 0.125, softcap, **how)
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "num"), [(1, 1), (3, 21)])
def test_combined_scores_are_those_of_the_definition(group: int, num: int, device: torch.device) -> None:
    check_combine(group, num, device, threads=32)


@needs_gpu
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("num", [1, 513, 100_003])
def test_combined_scores_at_real_sizes(group: int, num: int, device: torch.device) -> None:
    check_combine(group, num, device)
