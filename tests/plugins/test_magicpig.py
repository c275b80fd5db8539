"""MagicPIG against closed forms, chance, and attention written out by hand."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from pariskv_kernels import cpu as switch
from pariskv_kernels.lsh import (
    Queries,
    Rule,
    Sampled,
    Tables,
    Zone,
    build_tables,
    count_collisions,
    cpu,
    hash_codes,
    inclusion,
    naive,
    sampled_attention,
)
from pariskv_plugins.magicpig import MagicPIG, Options, random_planes
from pariskv_plugins.magicpig.sample import SampledCodes
from pariskv_plugins.resident import Resident
from tiny_models import dense_generate, prompt, tiny_model
from torch import Tensor

from pariskv.attention import merge
from pariskv.errors import ConfigError, PluginContractError
from pariskv.testing import check_retriever
from pariskv.types import Budget, LayerInfo, Partial, Query, Selection, Tensors
from tests.plugins.driving import budget_of, config_of, generated, layer_of, padded
from tests.plugins.test_graph_safe import no_host
from tests.plugins.test_pqcache import PromptOf

LENGTHS = [160, 48, 0]
CAPACITY = 192
PLACEMENTS = {"cpu": {}, "cpu, tables": {"segment": 16}, "device": {"placement": "device"}}


def coded(retriever: MagicPIG, layer: LayerInfo, keys: Tensor, values: Tensor, lengths: list[int]) -> Any:
    """What `fit` learns from keys [B, H, N, D], and their codes, with NaN past a row's length."""
    state = retriever.fit(layer, PromptOf(keys, lengths))
    codes = retriever.allocate_codes(layer, keys.shape[2])
    for field in codes.fields.values():
        field.fill_(float("nan") if field.is_floating_point() else torch.iinfo(field.dtype).max)
    for row, length in enumerate(lengths):
        if length:
            own = {name: tensor[row : row + 1] for name, tensor in state.items()}
            block = [rows[row : row + 1, :, :length] for rows in (keys, values)]
            codes.append([row], [0], retriever.encode(*block, own), length)
    codes.length.copy_(torch.tensor(lengths, dtype=torch.int32))
    return state, codes


class Problem:
    """Keys, values and queries of 2 key/value heads with groups of 3, for a ragged batch of three rows."""

    def __init__(self, lengths: list[int] = LENGTHS, dim: int = 16, shift: float = 1.0, seed: int = 0, group: int = 3):
        generator = torch.Generator().manual_seed(seed)
        batch, tokens = len(lengths), max(*lengths, CAPACITY)
        self.lengths = lengths
        self.keys = torch.randn(batch, 2, tokens, dim, generator=generator)
        self.keys += shift * torch.randn(batch, 2, 1, dim, generator=generator)
        self.values = torch.randn(batch, 2, tokens, dim, generator=generator)
        self.heads = 2 * torch.randn(batch, 2, group, dim, generator=generator)
        self.layer = layer_of(batch, 2, group, dim)

    def query(self, retriever: MagicPIG, state: Tensors, softcap: float | None = None) -> Query:
        return Query(self.heads, retriever.encode_query(self.heads, state), self.layer.scaling, softcap)

    def select(self, width: int = CAPACITY, softcap: float | None = None, **options: Any) -> tuple[Selection, Any]:
        """What MagicPIG selects, and its codes."""
        retriever = MagicPIG(Options(**options))
        state, codes = coded(retriever, self.layer, self.keys, self.values, self.lengths)
        counts = [min(width, length) for length in self.lengths]
        query = self.query(retriever, state, softcap)
        return retriever.coarse_select(query, codes, budget_of(counts, width)), codes

    def attend(self, selection: Selection, softcap: float | None = None) -> Partial:
        """Attention to what was selected and nothing else, in float64."""
        if selection.partial is not None:
            return selection.partial
        assert selection.bias is not None
        slots = selection.indices.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, -1, self.keys.shape[-1])
        scores = self.scores(self.keys.gather(2, slots), softcap) + selection.bias
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1).nan_to_num(neginf=0.0)).exp()
        return Partial(weights @ self.values.gather(2, slots).double(), lse)

    def scores(self, keys: Tensor, softcap: float | None = None) -> Tensor:
        scores = self.heads.double() @ keys.double().mT * self.layer.scaling
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def dense(self, row: int) -> Partial:
        """Attention of one row to its whole zone."""
        n = self.lengths[row]
        scores = self.scores(self.keys[:, :, :n])[row]
        return Partial(scores.softmax(-1) @ self.values[row, :, :n].double(), scores.logsumexp(-1))


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


# Inclusion probabilities


@pytest.mark.parametrize(
    ("bits", "tables", "golden"),
    [
        (10, 150, {0.0: 0.00968, 0.3: 0.2137, 0.5: 0.7356, 0.7: 0.9977}),
        (11, 300, {0.0: 0.00971, 0.3: 0.2752, 0.5: 0.8623}),
    ],
)
def test_inclusion_probabilities_are_the_published_ones(bits: int, tables: int, golden: dict[float, float]) -> None:
    for cosine, wanted in golden.items():
        digits = len(str(wanted)) - 2
        assert round(float(inclusion(torch.tensor(cosine, dtype=torch.float64), bits, tables)), digits) == wanted


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (4, 20), (10, 150), (11, 300)])
def test_inclusion_is_a_binomial_tail(bits: int, tables: int) -> None:
    for cosine in (-1.0, -0.5, 0.0, 0.2, 0.6, 0.95, 1.0, 1.0001):
        p = (1 - math.acos(min(cosine, 1.0)) / math.pi) ** bits
        tail = sum(math.comb(tables, j) * p**j * (1 - p) ** (tables - j) for j in range(2, tables + 1))
        assert float(inclusion(torch.tensor(cosine, dtype=torch.float64), bits, tables)) == pytest.approx(
            tail, abs=1e-12
        )


def test_keys_are_sampled_as_often_as_their_inclusion_probability_says() -> None:
    bits, tables, draws = 4, 12, 2000
    cosines = torch.tensor([-0.6, 0.0, 0.3, 0.6, 0.9])
    query = torch.zeros(1, 1, 1, 8)
    query[..., 0] = 3.0
    keys = torch.zeros(1, 1, 5, 8)
    keys[..., 0], keys[..., 1] = cosines, (1 - cosines.square()).sqrt()
    planes = random_planes(8, draws * tables * bits, 7, torch.device("cpu"))
    codes, hashes = (hash_codes(vectors, planes, bits).view(draws, 1, tables, -1) for vectors in (keys, query))
    counts = count_collisions(codes, hashes, torch.full((draws,), 5, dtype=torch.int32))
    share = (counts[:, 0, 0] >= 2).double().mean(0)
    wanted = inclusion(cosines.double(), bits, tables)
    assert 0.001 < float(wanted.min()) < 0.05
    assert float(wanted.max()) > 0.95
    deviation = (wanted * (1 - wanted) / draws).sqrt()
    assert bool(((share - wanted).abs() <= 4 * deviation).all()), (share, wanted)


# Hashes, tables, collisions


def test_a_hash_packs_the_signs_of_a_tables_products() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors, planes = torch.randn(2, 3, 9, 5, generator=generator), torch.randn(5, 12, generator=generator).double()
    vectors[0, 0, 0] = 0
    got = hash_codes(vectors, planes, 3)
    assert got.shape == (2, 3, 4, 9)
    for b, h, table, n in itertools.product(range(2), range(3), range(4), range(9)):
        signs = (vectors[b, h, n].double() @ planes[:, 3 * table : 3 * table + 3] >= 0).tolist()
        assert got[b, h, table, n] == signs[0] + 2 * signs[1] + 4 * signs[2]
    assert got[0, 0, :, 0].tolist() == [7, 7, 7, 7]


def test_a_hash_depends_on_neither_the_length_of_a_vector_nor_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors, planes = torch.randn(1, 2, 70, 64, generator=generator), random_planes(64, 1500, 42, torch.device("cpu"))
    whole = hash_codes(vectors, planes, 10)
    assert torch.equal(hash_codes(vectors * 7, planes, 10), whole)
    monkeypatch.setattr(naive, "AT_ONCE", 16)
    assert torch.equal(hash_codes(vectors, planes, 10), whole)
    parts = [hash_codes(vectors[:, :, start : start + 7], planes, 10) for start in range(0, 70, 7)]
    assert torch.equal(torch.cat(parts, -1), whole)
    assert whole.min() >= 0
    assert whole.max() < 1024


def test_tables_hold_every_token_once_in_its_bucket() -> None:
    codes = torch.randint(0, 8, (2, 1, 5, 48), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    order, starts = tables = build_tables(codes, 16, 3)
    assert order.shape == (2, 1, 3, 5, 16)
    assert starts.shape == (2, 1, 3, 5, 9)
    for b, segment, table, bucket in itertools.product(range(2), range(3), range(5), range(8)):
        first, last = starts[b, 0, segment, table, bucket : bucket + 2].tolist()
        held = order[b, 0, segment, table, first:last].tolist()
        own = codes[b, 0, table, 16 * segment : 16 * segment + 16].tolist()
        assert held == [place for place in range(16) if own[place] == bucket]
    assert torch.equal(naive.codes_of(tables), codes)


@pytest.mark.parametrize("compiled", [False, True])
def test_collisions_are_counted_as_by_hand(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "has_numba", lambda: compiled)
    monkeypatch.setattr(cpu, "PARALLEL_FROM", 0)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 3, (2, 2, 300, 4200), dtype=torch.int16, generator=generator)
    hashes = torch.randint(0, 3, (2, 2, 300, 2), dtype=torch.int16, generator=generator)
    codes[0, 0, :, 4150] = hashes[0, 0, :, 1]  # all 300 tables agree: more than a byte holds
    lengths = torch.tensor([4200, 77], dtype=torch.int32)
    got = count_collisions(codes, hashes, lengths)
    for row, length in enumerate(lengths.tolist()):
        for g in range(2):
            want = (codes[row, :, :, :length] == hashes[row, :, :, g].unsqueeze(-1)).sum(1)
            assert torch.equal(got[row, :, g, :length].long(), want)
        assert not got[row, :, :, length:].any()
    assert got[0, 0, 1, 4150] == 300


# Attention to a sample


def sampling(dtype: torch.dtype, lengths: list[int], bits: int = 3, tables: int = 6) -> tuple[Any, ...]:
    """Queries, zone (NaN past the lengths), hashes and the keys' centre for `sampled_attention`."""
    problem = Problem(lengths)
    centre = torch.randn(len(lengths), 2, 16, generator=torch.Generator().manual_seed(1))
    planes = random_planes(16, bits * tables, 3, torch.device("cpu"))
    keys, values = problem.keys.to(dtype), problem.values.to(dtype)
    centred = keys.float() - centre.unsqueeze(2)
    codes, norms = hash_codes(centred, planes, bits), centred.norm(dim=-1)
    for row, length in enumerate(lengths):
        for tensor in (keys, values, norms):
            tensor[row, :, length:] = float("nan")
    shifts = (problem.heads * centre.unsqueeze(2)).sum(-1)
    queries = Queries(problem.heads, hash_codes(problem.heads, planes, bits), shifts)
    return queries, Zone(keys, values, norms, torch.tensor(lengths, dtype=torch.int32)), codes, centre


def by_hand(queries: Queries, zone: Zone, codes: Tensor, centre: Tensor, rule: Rule) -> Sampled:
    """A token and a query head at a time, in float64."""
    batch, heads, group, dim = queries.heads.shape
    out, lse = torch.zeros(batch, heads, group, dim).double(), torch.full((batch, heads, group), -math.inf).double()
    rows = torch.zeros(batch, heads, dtype=torch.int64)
    for b, h in itertools.product(range(batch), range(heads)):
        sampled_by_any = set()
        for g in range(group):
            query, scores, values = queries.heads[b, h, g].double(), [], []
            for n in range(int(zone.lengths[b])):
                if int((codes[b, h, :, n] == queries.hashes[b, h, :, g]).sum()) < 2:
                    continue
                sampled_by_any.add(n)
                key = zone.keys[b, h, n].double()
                centred = key - centre[b, h].double()
                cosine = query @ centred / query.norm() / centred.norm()
                score = float(query @ key) * rule.scaling
                score = score if rule.softcap is None else rule.softcap * math.tanh(score / rule.softcap)
                scores.append(score - math.log(float(inclusion(cosine, rule.bits, rule.tables)) + 1e-4))
                values.append(zone.values[b, h, n].double())
            if scores:
                lse[b, h, g] = torch.tensor(scores).double().logsumexp(0)
                out[b, h, g] = torch.tensor(scores).double().softmax(0) @ torch.stack(values)
        rows[b, h] = len(sampled_by_any)
    return Sampled(out, lse, rows)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("segment", [0, 16])
def test_attention_to_the_sample_is_that_by_hand(
    dtype: torch.dtype, compiled: bool, segment: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "has_numba", lambda: compiled)
    monkeypatch.setattr(cpu, "SPAN", 50)
    queries, zone, codes, centre = sampling(dtype, LENGTHS)
    rule = Rule(3, 6, 0.25, softcap)
    buckets: Tensor | Tables = codes
    if segment:
        buckets = build_tables(codes, segment, 3)
        for row, length in enumerate(LENGTHS):
            for field in buckets:
                field[row, :, length // segment :] = torch.iinfo(torch.int16).max
    got, want = sampled_attention(queries, zone, buckets, rule), by_hand(queries, zone, codes, centre, rule)
    assert torch.equal(got.rows, want.rows)
    assert 0 < int(want.rows[0, 0]) < LENGTHS[0]
    assert not got.out[2].any()
    assert bool((got.lse[2] == -math.inf).all())
    torch.testing.assert_close(got.out.double(), want.out, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=0, atol=1e-4)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PARALLEL_FROM", 0)
    monkeypatch.setattr(cpu, "SPAN", 16)
    queries, zone, codes, _ = sampling(torch.float32, LENGTHS)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(sampled_attention(queries, zone, codes, Rule(3, 6, 0.25, None)))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_numba_leaves_torch_its_number_of_threads() -> None:
    """In a process of its own: Numba starts its threads once."""
    program = """
        import torch
        from pariskv_kernels.lsh.cpu import count_collisions

        torch.set_num_threads(1)
        count_collisions(*(torch.zeros(shape, dtype=dtype) for shape, dtype in (
            ((1, 1, 2, 8), torch.int16), ((1, 1, 2, 1), torch.int16), ((1,), torch.int32)
        )))
        print(torch.get_num_threads())
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("options", [{"bits": 3, "tables": 6}, {"bits": 5, "tables": 40}])
def test_both_placements_attend_to_the_same_sample_in_the_same_way(
    options: dict[str, Any], softcap: float | None
) -> None:
    problem = Problem()
    found = {name: problem.select(softcap=softcap, **options, **more) for name, more in PLACEMENTS.items()}
    attended = {name: problem.attend(selection, softcap) for name, (selection, _) in found.items()}
    for name in ("cpu", "cpu, tables"):
        torch.testing.assert_close(attended[name].out.double(), attended["device"].out, rtol=0, atol=1e-4)
        torch.testing.assert_close(attended[name].lse.double(), attended["device"].lse, rtol=0, atol=1e-4)
    sampled = {name: int(codes.sampled) for name, (_, codes) in found.items()}
    assert set(sampled.values()) == {int((found["device"][0].indices >= 0).sum())}
    assert 0 < sampled["cpu"] < 2 * sum(LENGTHS)


# The estimate


def test_the_sampled_sums_are_right_on_average() -> None:
    """Numerator and denominator of the softmax, over 400 draws of the directions."""
    problem = Problem([160], seed=4)
    dense, draws = problem.dense(0), 400
    totals, weighted = [], []
    for seed in range(draws):
        found = problem.attend(problem.select(bits=3, tables=5, seed=seed)[0])
        totals.append(found.lse.double().exp()[0])
        weighted.append(totals[-1].unsqueeze(-1) * found.out.double()[0])
    for sums, wanted in ((totals, dense.lse.exp()), (weighted, dense.lse.exp().unsqueeze(-1) * dense.out)):
        draw = torch.stack(sums)
        standard_error = draw.std(0) / math.sqrt(draws)
        assert float(((draw.mean(0) - wanted).abs() / standard_error).max()) < 5
        assert float((standard_error / wanted.abs().amax()).max()) < 0.1, "or the test shows nothing"


def test_the_error_falls_as_the_number_of_tables_grows_down_to_dense_attention() -> None:
    problem, seeds = Problem([160]), range(8)
    errors = []
    for tables in (4, 16, 64, 256, 2048):
        outs = [problem.attend(problem.select(bits=4, tables=tables, seed=seed)[0]).out[0] for seed in seeds]
        errors.append(sum(relative_error(out, problem.dense(0).out) for out in outs) / len(seeds))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.3
    # Every key is in the sample by now. The paper's 1e-4 beside a probability of 1 stays.
    assert errors[-1] < 2e-4


@pytest.mark.parametrize("placement", ["cpu", "device"])
def test_a_constant_added_to_all_keys_changes_neither_sample_nor_output(placement: str) -> None:
    """Scores keep the constant, which the softmax over sample and dense part does not see; hashes lose it."""
    problem = Problem([160])
    options = {"bits": 4, "tables": 12, "placement": placement}
    plain, codes = problem.select(**options)
    first = problem.attend(plain)
    constant = 5 * torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(8))
    problem.keys += constant
    moved, codes_moved = problem.select(**options)
    second = problem.attend(moved)
    assert torch.equal(plain.indices, moved.indices)
    assert int(codes.sampled) == int(codes_moved.sampled)
    shift = (problem.heads * constant).sum(-1) * problem.layer.scaling
    torch.testing.assert_close(second.lse.double(), first.lse.double() + shift, rtol=0, atol=1e-3)
    torch.testing.assert_close(second.out.double(), first.out.double(), rtol=0, atol=1e-3)


def test_sample_and_dense_part_together_are_dense_attention() -> None:
    """Tokens 0 to 31 are attended densely, the others by a sample of all of them; the keys' mean is far from 0."""
    problem = Problem([160], shift=6.0)
    everything, steady = problem.dense(0), problem.scores(problem.keys[:, :, :32])[0]
    dense_part = Partial(steady.softmax(-1) @ problem.values[0, :, :32].double(), steady.logsumexp(-1))
    problem.keys, problem.values, problem.lengths = problem.keys[:, :, 32:], problem.values[:, :, 32:], [128]
    sampled = problem.attend(problem.select(width=128, bits=2, tables=2000)[0])
    out, lse = merge(dense_part, Partial(sampled.out[0].double(), sampled.lse[0].double()))
    assert relative_error(out, everything.out) < 2e-4
    torch.testing.assert_close(lse, everything.lse, rtol=0, atol=2e-4)
    share = (sampled.lse[0].double() - lse).exp()
    assert 0.05 < float(share.min()) <= float(share.max()) < 0.999, "both parts matter"


# Placement device


def test_a_head_attends_to_its_own_sample_with_its_own_weights() -> None:
    selection, codes = Problem().select(placement="device", bits=3, tables=6)
    assert selection.bias is not None
    assert selection.indices.shape == (3, 2, 3 * CAPACITY)
    queries, zone, hashes, centre = sampling(torch.float32, LENGTHS)
    planes = random_planes(16, 18, 42, torch.device("cpu"))
    centre = torch.stack([zone.keys[row, :, :n].mean(1) for row, n in enumerate(LENGTHS)]).nan_to_num()
    centred = zone.keys - centre.unsqueeze(2)
    hashes, asked = hash_codes(centred, planes, 3), hash_codes(queries.heads, planes, 3)
    for b, h in itertools.product(range(3), range(2)):
        n = LENGTHS[b]
        counts = (hashes[b, h, :, :n].unsqueeze(1) == asked[b, h].unsqueeze(-1)).sum(0)  # [G, n]
        chosen = [token for token in selection.indices[b, h].tolist() if token >= 0]
        assert chosen == (counts >= 2).any(0).nonzero().flatten().tolist()
        cosines = torch.cosine_similarity(queries.heads[b, h].unsqueeze(1), centred[b, h, chosen].unsqueeze(0), dim=-1)
        want = -(inclusion(cosines, 3, 6) + 1e-4).log()
        want = want.masked_fill(counts[:, chosen] < 2, -math.inf)
        torch.testing.assert_close(selection.bias[b, h, :, : len(chosen)], want, rtol=1e-4, atol=1e-4)
        assert bool((selection.bias[b, h, :, len(chosen) :] == -math.inf).all())
    assert int(codes.dropped) == 0


def test_what_does_not_fit_is_dropped_fewest_collisions_first_and_counted() -> None:
    options = {"placement": "device", "bits": 3, "tables": 12}
    problem = Problem()
    everything, all_codes = problem.select(**options)
    few, codes = problem.select(width=10, **options)
    assert few.indices.shape == (3, 2, 30)
    assert int(codes.sampled) == int(all_codes.sampled) == int((everything.indices >= 0).sum())
    assert int(codes.dropped) == int((everything.indices >= 0).sum() - (few.indices >= 0).sum())
    assert int(codes.dropped) > 0
    retriever = MagicPIG(Options(**options))
    state, _ = coded(retriever, problem.layer, problem.keys, problem.values, LENGTHS)
    counts = count_collisions(codes["hashes"], retriever.encode_query(problem.heads, state)["hashes"], codes.length)
    for b, h in itertools.product(range(3), range(2)):
        kept, offered = (set(one.indices[b, h].tolist()) - {-1} for one in (few, everything))
        assert len(kept) == min(30, len(offered))
        if kept < offered:
            most = counts[b, h].amax(0)
            assert most[sorted(kept)].min() >= most[sorted(offered - kept)].max()
    retriever.coarse_select(problem.query(retriever, state), codes, budget_of([10, 10, 0], 10))
    assert int(codes.sampled) == 2 * int(all_codes.sampled), "steps add up"


def test_a_step_on_the_device_never_asks_the_host() -> None:
    problem, resident = Problem(), Resident()
    retriever = MagicPIG(Options(placement="device", bits=3, tables=6))
    state, codes = coded(retriever, problem.layer, problem.keys, problem.values, LENGTHS)
    store, budget = resident.allocate_store(problem.layer, CAPACITY), budget_of([50, 20, 0], 50)
    resident.update(problem.keys, problem.values, store, [0, 1, 2])
    slots = torch.zeros(3, 2, 150, 2, 16)

    def step() -> Tensor:
        selection = retriever.coarse_select(problem.query(retriever, state, 30.0), codes, budget)
        return resident.fetch(selection, store, slots).valid

    assert retriever.graph_safe
    warmed_up = step()
    with no_host():
        again = step()
    assert torch.equal(again, warmed_up)
    assert not MagicPIG().graph_safe


# Placement cpu


def test_the_cpu_keeps_its_own_copy_wherever_the_layer_is() -> None:
    for dtype, held in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
    ):
        layer = LayerInfo(0, 1, 2, 3, 64, dtype, torch.device("meta"), 0.125)
        codes = MagicPIG().allocate_codes(layer, 100)
        assert {field.device.type for field in codes.fields.values()} == {"cpu"}
        assert (codes["keys"].dtype, codes["values"].dtype) == (held, held)


def test_the_tables_of_a_key_cost_what_the_published_integers_cost() -> None:
    layer = layer_of(1, 1, 1, 128, torch.bfloat16)
    codes = MagicPIG(Options(segment=8192)).allocate_codes(layer, 4 * 8192)
    per_key = {name: field.nbytes / (4 * 8192) for name, field in codes.fields.items()}
    assert per_key["keys"] + per_key["values"] == 512
    assert per_key["order"] == 300
    assert per_key["starts"] < 40
    assert MagicPIG().allocate_codes(layer, 100)["hashes"].nbytes == 300 * 100


def test_a_finished_attention_needs_no_slots() -> None:
    selection, _ = Problem().select(bits=3, tables=6)
    assert selection.indices.shape == (3, 2, 0)
    assert selection.bias is None
    assert not MagicPIG().selects_per_query_head


# The contract


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_of_a_ragged_batch_attend_to_what_they_attend_to_alone(placement: str) -> None:
    options = {"bits": 3, "tables": 6, **PLACEMENTS[placement]}
    whole = Problem()
    together = whole.attend(whole.select(width=20, **options)[0])
    for row in range(2):
        alone = Problem()
        part = slice(row, row + 1)
        alone.lengths, alone.layer = LENGTHS[part], layer_of(1, 2, 3, 16)
        alone.keys, alone.values, alone.heads = alone.keys[part], alone.values[part], alone.heads[part]
        found = alone.attend(alone.select(width=20, **options)[0])
        torch.testing.assert_close(together.out[part], found.out, rtol=0, atol=1e-5)
        torch.testing.assert_close(together.lse[part], found.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_contract_with_tables_of_segments(dtype: torch.dtype) -> None:
    retriever = MagicPIG(Options(bits=4, tables=12, **PLACEMENTS["cpu, tables"]))
    check_retriever(retriever, dtype=dtype, lengths=(160, 16, 0), top_k=20)


def test_it_keeps_the_contract_with_the_published_tables() -> None:
    check_retriever(MagicPIG(), lengths=(130, 16, 0), top_k=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 15}, "magicpig: bits=15; set it to an integer from 1 to 14"),
        ({"tables": 1}, "magicpig: tables=1; set it to an integer from 2"),
        ({"seed": True}, "magicpig: seed=True; set it to an integer from 0"),
        ({"placement": "gpu"}, "magicpig: placement='gpu'; set it to one of cpu, device"),
        ({"segment": -1}, "magicpig: segment=-1; set it to an integer from 0 to 16384"),
        ({"segment": 64, "placement": "device"}, "magicpig: segment=64, but placement device has no tables"),
    ],
)
def test_an_invalid_option_is_an_error_that_says_what_to_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MagicPIG(Options(**options))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_query_that_its_producer_did_not_encode_is_refused(placement: str) -> None:
    problem, retriever = Problem(), MagicPIG(Options(bits=3, tables=6, **PLACEMENTS[placement]))
    _, codes = coded(retriever, problem.layer, problem.keys, problem.values, LENGTHS)
    with pytest.raises(PluginContractError, match="pass what encode_query of the codes' producer returned"):
        retriever.coarse_select(Query(problem.heads, None, 1.0), codes, Budget(1, torch.ones(3, dtype=torch.int32)))


# In a model

NEW = 30
ALMOST_ALL: dict[str, Any] = {"bits": 1, "tables": 300}
"""So many tables of one bit that every key is in the sample, as good as certainly."""


@pytest.mark.parametrize(
    ("placement", "family"), [("cpu", "llama"), ("cpu", "gemma2"), ("cpu, tables", "llama"), ("device", "llama")]
)
def test_a_sample_of_everything_is_dense_attention(placement: str, family: str) -> None:
    model, ids = tiny_model(family), prompt(90)
    want, _ = dense_generate(model, ids, NEW)
    options = {**ALMOST_ALL, **PLACEMENTS[placement], "index_generated": True}
    got, cache = generated(model, ids, config_of("magicpig", options, top_k=400), NEW)
    assert torch.equal(got, want)
    codes = cache.request.layers[1].codes["it"]
    assert isinstance(codes, SampledCodes)
    assert int(codes.sampled) > 0.9 * NEW * 2 * 80


@pytest.mark.parametrize("index_generated", [False, True])
def test_generated_tokens_stay_dense_unless_they_are_to_be_indexed(index_generated: bool) -> None:
    options = {"bits": 4, "tables": 20, "index_generated": index_generated}
    _, cache = generated(tiny_model("llama"), prompt(90), config_of("magicpig", options, top_k=1), NEW)
    zones = cache.request.layers[1].zones
    assert zones == ([104] if index_generated else [72])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(placement: str) -> None:
    model, rows = tiny_model("llama"), [prompt(n, seed=n) for n in (3, 41, 70)]
    options = {"bits": 6, "tables": 12, **PLACEMENTS[placement], "index_generated": True}
    config = config_of("magicpig", options, top_k=8)
    ids, mask = padded(rows)
    together, cache = generated(model, ids, config, NEW, mask)
    assert cache.request.layers[1].zones[2] > 0
    for row, alone in enumerate(rows):
        assert torch.equal(together[row], generated(model, alone, config, NEW)[0][0]), f"row {row}"
    dense, _ = dense_generate(model, rows[2], NEW)
    assert not torch.equal(together[2:], dense), "a sample that loses something, or the test shows nothing"


def test_pariskv_reranks_its_sample() -> None:
    model, ids = tiny_model("llama"), prompt(90)
    want, _ = dense_generate(model, ids, NEW)
    layers = {"0": {"retriever": "dense"}}
    options = {**ALMOST_ALL, "placement": "device", "index_generated": True}
    config = config_of("magicpig", options, layers, rerank="pariskv", candidates=1.0, top_k=400)
    got, cache = generated(model, ids, config, NEW)
    assert torch.equal(got, want)
    assert sorted(cache.request.layers[1].codes) == ["it", "pariskv"]
    small = config_of("magicpig", options, layers, rerank="pariskv", candidates=0.5, top_k=4)
    less, cache = generated(model, ids, small, NEW)
    assert less.shape == (1, NEW)
    assert cache.request.layers[1].attended <= 4 + 4 + 8 + 8  # top_k, sink, local, update buffer
