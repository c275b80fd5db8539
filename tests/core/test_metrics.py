"""The measures agree with their definitions, written out in plain loops; and nobody beats the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.metrics import (
    LAYER_MEASURES,
    LOGIT_MEASURES,
    SIZES,
    Fidelity,
    Observed,
    Truth,
    argmax_agreement,
    dense_truth,
    kl_divergence,
    measure,
    measure_logits,
    relative_error,
)
from pariskv.types import Partial, Query, Selection

# float64 sums over a few dozen numbers, taken in another order.
TOLERANCE = 1e-12

HEADS, GROUP, DIM = 2, 3, 4


def case(
    tokens: list[int], zones: list[int], start: int, seed: int = 0, softcap: float | None = None
) -> tuple[Truth, Query, Tensor, Tensor]:
    """Dense attention of random queries over rows of the given lengths; what lies past them is NaN."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    keys, values = normal(2, len(tokens), HEADS, max(tokens), DIM)
    for row, length in enumerate(tokens):
        keys[row, :, length:] = values[row, :, length:] = math.nan
    query = Query(2 * normal(len(tokens), HEADS, GROUP, DIM), None, 0.7, softcap)
    return dense_truth(query, keys, values, tokens, zones, start), query, keys, values


def probabilities(query: Query, keys: Tensor, tokens: int, row: int, head: int, group: int) -> list[float]:
    scores = [query.scaling * float(query.heads[row, head, group] @ keys[row, head, i]) for i in range(tokens)]
    if query.softcap is not None:
        scores = [query.softcap * math.tanh(score / query.softcap) for score in scores]
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def by_hand(
    query: Query, keys: Tensor, tokens: int, zone: int, start: int, row: int, head: int, seen: Observed, top_k: int
) -> dict[str, float]:
    """The definitions at the top of `pariskv.metrics`, for one key/value head."""
    p = [probabilities(query, keys, tokens, row, head, g) for g in range(GROUP)]
    combined = [sum(p[g][i] for g in range(GROUP)) for i in range(tokens)]
    ranked = sorted(range(start, start + zone), key=lambda i: -combined[i])
    assert seen.candidates is not None
    assert seen.selection is not None
    proposed = {start + i for i in seen.candidates[row, head].tolist() if i >= 0}
    slots = seen.selection.indices[row, head].tolist()
    fetched = {start + i for i in slots if i >= 0}
    bias = seen.selection.bias
    chosen = [
        {start + i for k, i in enumerate(slots) if i >= 0 and (bias is None or bias[row, head, g, k] > -math.inf)}
        for g in range(GROUP)
    ]
    oracle = set(ranked[: min(top_k, zone)])
    mass = sum(p[g][i] for g in range(GROUP) for i in chosen[g]) / GROUP
    best = sum(combined[i] for i in ranked[: len(fetched)]) / GROUP
    return {
        "candidate_recall": len(proposed & oracle) / len(oracle) if oracle else 1.0,
        "recall": len(set().union(*chosen) & oracle) / len(oracle) if oracle else 1.0,
        "mass": mass,
        "oracle_mass": best,
        "mass_ratio": 1.0 if not zone else mass / best if fetched else 0.0,
        "fetched": len(fetched),
        "attended": tokens - zone + sum(map(len, chosen)) / GROUP,
    }


@st.composite
def runs(draw: Any) -> dict[str, Any]:
    """Rows of different lengths, and any selections that the contract allows."""
    start = draw(st.integers(0, 3))
    zones = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    tokens = [start + zone + draw(st.integers(1, 4)) for zone in zones]
    width, proposed = draw(st.integers(0, 6)), draw(st.integers(0, 8))

    def positions(width: int) -> Tensor:
        rows = []
        for zone in zones:
            for _ in range(HEADS):
                order = draw(st.permutations([*range(zone), *[-1] * width]))
                rows.append(order[:width])
        return torch.tensor(rows, dtype=torch.int32).view(len(zones), HEADS, width)

    bias = None
    if draw(st.booleans()):
        flags = draw(st.lists(st.booleans(), min_size=width * GROUP, max_size=width * GROUP))
        one = torch.where(torch.tensor(flags, dtype=torch.bool).view(GROUP, width), -1.5, -math.inf)
        bias = one.expand(len(zones), HEADS, -1, -1)
    return {
        "tokens": tokens,
        "zones": zones,
        "start": start,
        "selection": Selection(positions(width), bias),
        "candidates": positions(proposed),
        "top_k": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 99)),
        "softcap": draw(st.sampled_from([None, 1.5])),
    }


@given(runs())
def test_the_measures_are_what_their_definitions_say(run: dict[str, Any]) -> None:
    truth, query, keys, _ = case(run["tokens"], run["zones"], run["start"], run["seed"], run["softcap"])
    seen = Observed(run["candidates"], run["selection"], truth.out)
    found = measure(truth, seen, run["top_k"])
    assert set(found) == {*LAYER_MEASURES, *SIZES}
    for row, (tokens, zone) in enumerate(zip(run["tokens"], run["zones"], strict=True)):
        for head in range(HEADS):
            wanted = by_hand(query, keys, tokens, zone, run["start"], row, head, seen, run["top_k"])
            for name, value in wanted.items():
                assert float(found[name][row, head]) == pytest.approx(value, abs=TOLERANCE), name
    assert float(found["mass_ratio"].max()) <= 1.0
    assert float(found["output_error"].max()) == 0.0


@given(st.integers(0, 99), st.sampled_from([None, 1.5]))
def test_the_truth_is_softmax_attention_over_the_rows_own_tokens(seed: int, softcap: float | None) -> None:
    tokens = [7, 3]
    truth, query, keys, values = case(tokens, [4, 0], 2, seed, softcap)
    for row, length in enumerate(tokens):
        for head in range(HEADS):
            for group in range(GROUP):
                p = probabilities(query, keys, length, row, head, group)
                torch.testing.assert_close(truth.probabilities[row, head, group, :length].tolist(), p)
                assert truth.probabilities[row, head, group, length:].tolist() == [0.0] * (7 - length)
                out = sum(weight * values[row, head, i] for i, weight in enumerate(p))
                torch.testing.assert_close(truth.out[row, head, group], out)
    assert truth.zone.tolist() == [[False, False, True, True, True, True, False], [False] * 7]
    assert truth.steady.tolist() == [3, 3]


def test_the_oracle_itself_has_a_ratio_of_one_and_a_worse_choice_has_less() -> None:
    truth, *_ = case([40], [30], 4)
    combined = truth.probabilities.sum(2)[..., 4:34]
    best, worst = combined.topk(5).indices.int(), (-combined).topk(5).indices.int()
    good, bad = (measure(truth, Observed(one, Selection(one), truth.out), 5) for one in (best, worst))
    torch.testing.assert_close(good["mass_ratio"], torch.ones(1, HEADS, dtype=torch.float64), rtol=0, atol=TOLERANCE)
    assert good["recall"].tolist() == [[1.0] * HEADS]
    assert bad["recall"].tolist() == [[0.0] * HEADS]
    assert float(bad["mass_ratio"].max()) < 0.5


def test_a_position_that_is_listed_twice_counts_once() -> None:
    truth, *_ = case([40], [30], 4)
    best = truth.probabilities.sum(2)[..., 4:34].topk(1).indices.int()
    found = measure(truth, Observed(best, Selection(best.expand(-1, -1, 3)), truth.out), 1)
    assert found["fetched"].tolist() == [[1.0] * HEADS]
    assert found["mass_ratio"].tolist() == [[1.0] * HEADS]


def test_dense_loses_nothing_and_nothing_fetched_is_nothing_found() -> None:
    whole, *_ = case([12], [0], 4)
    dense = measure(whole, Observed(None, None, whole.out), 5)
    assert [float(dense[name].min()) for name in ("candidate_recall", "recall", "mass_ratio")] == [1.0] * 3
    assert dense["attended"].tolist() == [[12.0] * HEADS]
    truth, *_ = case([12], [8], 2)
    nothing = torch.empty(1, HEADS, 0, dtype=torch.int32)
    found = measure(truth, Observed(nothing, Selection(nothing), truth.out), 5)
    assert [float(found[name].max()) for name in ("candidate_recall", "recall", "mass_ratio")] == [0.0] * 3
    assert found["attended"].tolist() == [[4.0] * HEADS]


def test_what_only_a_partial_attention_saw_is_not_known() -> None:
    truth, *_ = case([12], [8], 2)
    empty = torch.empty(1, HEADS, 0, dtype=torch.int32)
    partial = Partial(truth.out, truth.out[..., 0])
    found = measure(truth, Observed(empty, Selection(empty, partial=partial), 2 * truth.out), 5)
    assert set(found) == {"output_error", "fetched"}
    torch.testing.assert_close(found["output_error"], torch.ones(1, HEADS, dtype=torch.float64))
    none_chosen = torch.full((1, HEADS, 3), -1, dtype=torch.int32)
    found = measure(truth, Observed(none_chosen, Selection(none_chosen, partial=partial), 2 * truth.out), 5)
    assert [float(found[name].max()) for name in ("recall", "mass_ratio")] == [0.0] * 2  # slots, and nothing in them


@pytest.mark.parametrize("position", [8, 9, 10, 300])
def test_a_position_outside_of_the_zone_is_refused(position: int) -> None:
    truth, *_ = case([12], [8], 2)
    wrong = torch.full((1, HEADS, 1), position, dtype=torch.int32)
    with pytest.raises(
        PluginContractError, match=f"the selection has the position {position}, but the row's zone has 8"
    ):
        measure(truth, Observed(None, Selection(wrong), truth.out), 5)
    with pytest.raises(PluginContractError, match="coarse_select has the position"):
        measure(truth, Observed(wrong, None, truth.out), 5)


def test_the_relative_error_is_one_where_the_output_is_lost_and_nothing_where_both_are_nothing() -> None:
    out, zeros = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
    assert relative_error(zeros, out).tolist() == [1.0]
    assert relative_error(out * 1.1, out).tolist() == pytest.approx([0.1], rel=1e-5)
    assert relative_error(zeros, zeros).tolist() == [0.0]


def test_kl_and_argmax_of_a_hand_made_pair() -> None:
    dense, other = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    wanted = 0.5 * math.log(2) - 0.25 * math.log(2)
    # Inputs are float32.
    assert kl_divergence(other, dense).tolist() == pytest.approx([wanted], abs=1e-6)
    assert kl_divergence(dense + 7, dense).tolist() == pytest.approx([0.0], abs=1e-6)
    assert argmax_agreement(other, dense).tolist() == [0.0]
    found = measure_logits(dense, dense)
    assert tuple(found) == LOGIT_MEASURES
    assert found["argmax_agreement"].tolist() == [1.0]


def test_the_means_by_layer_head_and_step_are_those_of_all_the_values() -> None:
    values = torch.rand(3, 5, 2, HEADS, dtype=torch.float64)  # layers, steps, rows, heads
    fidelity = Fidelity()
    for layer in range(3):
        for step in range(5):
            fidelity.add(layer, step, {"mass": values[layer, step]})
    assert fidelity.summary()["mass"] == pytest.approx(float(values.mean()))
    for layer in range(3):
        assert fidelity.per_layer()[layer]["mass"] == pytest.approx(float(values[layer].mean()))
        assert fidelity.per_head()[layer]["mass"] == pytest.approx(values[layer].mean((0, 1)).tolist())
    for step in range(5):
        assert fidelity.per_step()[step]["mass"] == pytest.approx(float(values[:, step].mean()))


def test_a_run_holds_a_number_a_head_and_step_however_long_it_is() -> None:
    fidelity = Fidelity()
    for step in range(1000):
        fidelity.add(0, step, {"mass": torch.rand(1, HEADS, dtype=torch.float64)})
    held = [mean.total for means in fidelity.layers.values() for mean in means.values()]
    held += [mean.total for means in fidelity.steps.values() for mean in means.values()]
    assert sum(total.numel() for total in held if total is not None) == HEADS + 1000


def test_a_measure_that_a_layer_does_not_have_is_averaged_over_the_others() -> None:
    fidelity = Fidelity()
    fidelity.add(0, 0, {"mass": torch.ones(1, HEADS), "fetched": torch.ones(1, HEADS)})
    fidelity.add(1, 0, {"fetched": torch.zeros(1, HEADS)})
    assert fidelity.summary() == {"mass": 1.0, "fetched": 0.5}
