"""The choice of the next token."""

from __future__ import annotations

import pytest
import torch

from pariskv.config import GenerationConfig
from pariskv.sampling import Sampler


def sampler(batch: int = 1, **settings: float) -> Sampler:
    return Sampler(GenerationConfig(**{"temperature": 1.0, **settings}), batch)  # type: ignore[arg-type]


def test_temperature_zero_takes_the_largest() -> None:
    assert sampler(2, temperature=0.0)(torch.tensor([[1.0, 3, 2], [0, -1, -2]])).tolist() == [1, 0]


def test_tokens_come_as_often_as_their_probabilities() -> None:
    wanted = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    draw, logits = sampler(4000), wanted.log().expand(4000, -1)
    for generator, seed in zip(draw._generators, range(4000), strict=True):
        generator.manual_seed(seed)
    share = draw(logits).bincount(minlength=4) / 4000
    assert share[1] == 0
    torch.testing.assert_close(share.double(), wanted, atol=0.03, rtol=0)


def test_a_draw_chooses_where_it_falls_among_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64).log().unsqueeze(0)
    for number, token in ((0.0, 0), (0.49, 0), (0.51, 2), (0.79, 2), (0.81, 3), (1 - 2**-53, 3)):
        assert sampler().choose(logits, torch.tensor([number], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {0}), (0.5, {0}), (0.6, {0, 2}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64).log().unsqueeze(0)
    draws = torch.linspace(0, 1 - 2**-53, 200, dtype=torch.float64)
    chosen = {int(sampler(top_p=top_p).choose(logits, one.view(1))) for one in draws}
    assert chosen == kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(1, 1.0, {0}), (2, 1.0, {0, 2}), (3, 0.7, {0, 2}), (9, 1.0, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_most_likely_and_top_p_chooses_among_them(top_k: int, top_p: float, kept: set[int]) -> None:
    """Of three tokens with 0.5, 0.25 and 0.15, two have 0.75 / 0.9 of the mass that is left."""
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64).log().unsqueeze(0)
    draws = torch.linspace(0, 1 - 2**-53, 200, dtype=torch.float64)
    chosen = {int(sampler(top_k=top_k, top_p=top_p).choose(logits, one.view(1))) for one in draws}
    assert chosen == kept


def test_no_draw_reaches_a_token_behind_the_last_that_is_kept() -> None:
    logits = torch.tensor([[0.0, -1.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    assert sampler().choose(logits, torch.ones(1, dtype=torch.float64)).tolist() == [1]


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    together, alone = sampler(3), sampler(1)
    for _ in range(5):
        assert together(logits)[2:].tolist() == alone(logits[2:]).tolist()
