"""The estimate of what was not chosen, against sums that are written out in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pariskv_kernels import cpu
from pariskv_kernels.rest import LEAST, Known, Rest, estimate_rest, weigh_candidates
from torch import Tensor

B, H, G, D, N = 2, 3, 4, 16, 400
SCALING = 0.25


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sums_of(scores: Tensor, parts: int = 1) -> Tensor:
    """What `sum_estimates` gives of scores [..., C]: a part's highest, the sum of exp(score - highest), the count."""
    found = []
    for part in scores.chunk(parts, dim=-1):
        highest, count = part.amax(-1), (part > -math.inf).sum(-1)
        mass = (part - highest.unsqueeze(-1)).exp().nan_to_num(0.0).sum(-1)
        found.append(torch.stack((highest, mass, count), dim=-1))
    return torch.stack(found, dim=-2).float()


def zone(offset: Tensor | None = None, length: int = N) -> Known:
    lengths = torch.full((B,), length, dtype=torch.int32)
    return Known(lengths, offset, random(B, H, D, D, seed=2))


MEAN = random(B, H, D, seed=1)


@pytest.fixture(autouse=True, params=[False, True], ids=["defined", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_numba", lambda: request.param)


def rest_of(heads: Tensor, candidates: Tensor, chosen: Tensor, known: Known, mean: Tensor = MEAN) -> Rest:
    return estimate_rest(weigh_candidates(heads, candidates, known, SCALING), chosen, mean)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_candidates_that_lost_weigh_what_is_missing(parts: int, dtype: torch.dtype) -> None:
    scores, heads, known = 3 * random(B, H, G, 60).double(), random(B, H, G, D, seed=5).to(dtype), zone()
    rest = rest_of(heads, sums_of(scores, parts), sums_of(scores[..., :20]), known)
    assert (rest.out.dtype, rest.lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(rest.lse.double(), scores[..., 20:].logsumexp(-1), rtol=1e-4, atol=1e-4)
    for b, h, g in itertools.product(range(B), range(H), range(G)):
        wanted = MEAN[b, h].double() + SCALING * heads[b, h, g].double() @ known.slopes[b, h].double()
        torch.testing.assert_close(rest.out[b, h, g].double(), wanted, rtol=1e-4, atol=1e-4)


def test_their_value_is_the_mean_under_the_weights_where_keys_and_values_are_normal() -> None:
    n = 200_000
    both = random(n, 2 * D).double() @ random(2 * D, 2 * D, seed=1).double() / 8
    keys, values = both.split(D, dim=1)
    query = random(D, seed=2)
    slopes = (keys - keys.mean(0)).mT @ (values - values.mean(0)) / n
    known = Known(torch.tensor([n]).int(), None, slopes.view(1, 1, D, D).float())
    scores = (keys @ query.double()) * SCALING
    sums = sums_of(scores.view(1, 1, 1, n)), sums_of(torch.full((1, 1, 1, 1), -math.inf))
    rest = rest_of(query.view(1, 1, 1, D), *sums, known, values.mean(0).view(1, 1, D).float())
    wanted = scores.softmax(0) @ values
    assert float((values.mean(0) - wanted).norm()) > 0.1  # the weights do matter
    torch.testing.assert_close(rest.out[0, 0, 0].double(), wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.6])
def test_of_normal_scores_the_others_are_known_by_the_candidates(deviation: float, share: float) -> None:
    n, chosen = 100_000, 10
    normal = random(n).double()
    scores = deviation * (normal - normal.mean()) / normal.std() + 0.7
    count = round(share * n)
    best = scores.sort(descending=True).values
    lost, beyond = best[chosen:count].logsumexp(0), best[count:].logsumexp(0)
    heads = torch.zeros(1, 1, 1, D)
    known = Known(torch.tensor([n]).int(), torch.full((1, 1, 1), 0.7 / SCALING), torch.zeros(1, 1, D, D))
    sums = sums_of(best[None, None, None, :count]), sums_of(best[None, None, None, :chosen])
    rest = rest_of(heads, *sums, known, torch.ones(1, 1, D))
    wanted = torch.logaddexp(lost, torch.minimum(beyond, lost))
    assert float(rest.lse) == pytest.approx(float(wanted), abs=0.02)
    assert float((wanted - lost).abs()) > 0.01  # and that is not nothing


def test_what_lies_beyond_has_the_mean_value() -> None:
    scores, heads = random(B, H, G, 60), random(B, H, G, D, seed=5)
    sums = sums_of(scores), sums_of(scores[..., :20])
    # A mean score so high that the others weigh as much as they may: as much as the candidates that lost.
    known = zone(offset=torch.full((B, H, G), 100.0))
    without = zone()
    more = rest_of(heads, *sums, known)
    less = rest_of(heads, *sums, without)
    torch.testing.assert_close(more.lse, less.lse + math.log(2))
    torch.testing.assert_close(more.out, (less.out + MEAN.unsqueeze(2)) / 2)


@pytest.mark.parametrize("offset", [None, torch.zeros(B, H, G)])
def test_where_nothing_is_left_nothing_is_made_up(offset: Tensor | None) -> None:
    heads, scores = random(B, H, G, D), random(B, H, G, 60)
    nothing = sums_of(torch.full((B, H, G, 5), -math.inf))
    cases = {
        "no candidates": (nothing, nothing, N),
        "an empty zone": (nothing, nothing, 0),
        "all chosen": (sums_of(scores), sums_of(scores.flip(-1), parts=4), N),
        "all but what rounding leaves": (sums_of(scores), sums_of(scores + LEAST / 2), N),
    }
    for name, (candidates, chosen, length) in cases.items():
        rest = rest_of(heads, candidates, chosen, zone(offset, length))
        assert bool((rest.lse == -math.inf).all()), name
        assert bool(rest.out.isfinite().all()), name
    whole = rest_of(heads, sums_of(scores), sums_of(scores[..., :20]), zone(offset, 60))
    torch.testing.assert_close(whole.lse, scores[..., 20:].logsumexp(-1))  # every token is a candidate


def test_wrong_arguments_are_named() -> None:
    heads, sums = random(B, H, G, D), sums_of(random(B, H, G, 5))
    with pytest.raises(TypeError, match=r"candidates: wanted dtype torch\.float32"):
        weigh_candidates(heads, sums.double(), zone(), SCALING)
    with pytest.raises(ValueError, match=r"known\.slopes: wanted shape"):
        weigh_candidates(heads, sums, zone()._replace(slopes=torch.zeros(B, H, D, 3)), SCALING)
    with pytest.raises(ValueError, match=r"known\.offset: wanted shape"):
        weigh_candidates(heads, sums, zone(torch.zeros(B, H)), SCALING)
    weighed = weigh_candidates(heads, sums, zone(), SCALING)
    with pytest.raises(ValueError, match="chosen: wanted shape"):
        estimate_rest(weighed, sums[:1], MEAN)
    with pytest.raises(ValueError, match="mean: wanted shape"):
        estimate_rest(weighed, sums, MEAN[:1])
    with pytest.raises(ValueError, match=r"weighed\.beyond: wanted shape"):
        estimate_rest(weighed._replace(beyond=weighed.beyond[:1]), sums, MEAN)
