"""With a budget that covers the history, every stage running, the output is dense attention's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, dense_generate, greedy, language_model, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache, parse_config
from pariskv.config import Config, GenerationConfig
from pariskv.decode import Batch, decode, prefill

SINK, LOCAL, U = 4, 8, 8
NEW = SINK + LOCAL + 4 * U  # three updates at least, from a prompt of one token too
LENGTHS = [1, 2, SINK, SINK + LOCAL, SINK + LOCAL + U - 1, SINK + LOCAL + U, SINK + LOCAL + U + 1, 150]
# Logits come out of generate() in float32.
LOGIT_TOLERANCE = 1e-6


def covering(retriever: str = "pariskv", sink: int = SINK, local: int = LOCAL, u: int = U, **layer: Any) -> Config:
    """Every token is a candidate and every candidate is selected; no row is below dense_below."""
    return parse_config(
        {
            "layers": {"default": {"retriever": retriever, "candidates": 1.0, "top_k": 400, **layer}},
            "window": {"sink": sink, "local": local, "update_interval": u, "dense_below": 0},
        }
    )


def generated(model: Any, ids: Tensor, config: Config, new: int = NEW, mask: Tensor | None = None) -> tuple[Any, Any]:
    """What `generate(cache=ParisCache)` gives, with the hidden states of every layer at every step."""
    cache = ParisCache(model, config)
    return greedy(model, ids, new, mask, cache=cache, output_hidden_states=True), cache


def by_our_loop(
    model: Any, ids: Tensor, config: Config, new: int, chunk: int | None = None, mask: Tensor | None = None
) -> Tensor:
    lm, batch = language_model(model), Batch(ids, mask)
    cache = ParisCache(model, config)
    logits = prefill(lm, cache, batch, new, chunk)
    steps = list(decode(lm, cache, batch, logits, GenerationConfig(max_new_tokens=new)))
    return torch.tensor(steps).T


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_the_models_own_dense_attention(family: str) -> None:
    model = tiny_model(family)
    for length in (1, SINK + LOCAL + U + 1, 60):
        want, want_logits = dense_generate(model, prompt(length), NEW)
        out, cache = generated(model, prompt(length), covering())
        assert torch.equal(out.sequences[:, length:], want)
        torch.testing.assert_close(torch.stack(out.logits, 1), want_logits, rtol=0, atol=LOGIT_TOLERANCE)
        assert max(cache.request.layers[1].zones) >= 3 * U, "the stages must have run"


@pytest.mark.parametrize("retriever", ["pariskv", "exact"])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_layer_agrees_at_every_step_over_three_updates(length: int, retriever: str) -> None:
    model = tiny_model("llama")
    ids = prompt(length, seed=length)
    model.set_attn_implementation("eager")
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    want = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        output_hidden_states=True,
        **arguments,
    )
    got, _ = generated(model, ids, covering(retriever))
    assert torch.equal(got.sequences, want.sequences)
    for step, (ours, dense) in enumerate(zip(got.hidden_states, want.hidden_states, strict=True)):
        for layer, (a, b) in enumerate(zip(ours, dense, strict=True)):
            # The model's own softmax and norms round to float32, whatever its dtype.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, at=(step, layer): f"{at}: {m}")


def test_three_thousand_tokens_and_three_updates_of_256() -> None:
    model = tiny_model("llama")
    ids = prompt(3000)
    new = 3 * 256 + 10
    want, _ = dense_generate(model, ids, new)
    config = covering(sink=64, local=256, u=256, top_k=4000)
    assert torch.equal(by_our_loop(model, ids, config, new), want)


@pytest.mark.parametrize("length", [1, 2, 64, 64 + 256, 64 + 256 + 255, 64 + 256 + 257])
def test_the_defaults_are_dense_below_dense_below(length: int) -> None:
    model = tiny_model("llama")
    want, _ = dense_generate(model, prompt(length), 24)
    out, cache = generated(model, prompt(length), parse_config({}), new=24)
    assert torch.equal(out.sequences[:, length:], want)
    assert cache.request.layers[0].zones == [0]


def test_a_row_that_grows_past_dense_below_hands_over_all_but_local() -> None:
    model = tiny_model("llama")
    config = parse_config(
        {
            "layers": {"default": {"candidates": 1.0, "top_k": 400}},
            "window": {"sink": SINK, "local": LOCAL, "update_interval": U, "dense_below": 60},
        }
    )
    want, _ = dense_generate(model, prompt(20), 80)
    assert torch.equal(by_our_loop(model, prompt(20), config, 80), want)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunked_prefill_gives_the_tokens_of_one_chunk(chunk: int) -> None:
    model = tiny_model("llama")
    config = parse_config(
        {
            "layers": {"default": {"top_k": 12, "candidates": 0.5}},
            "window": {"sink": SINK, "local": LOCAL, "update_interval": U, "dense_below": 0},
        }
    )
    ids = prompt(203)
    whole = by_our_loop(model, ids, config, 40)
    dense, _ = dense_generate(model, ids, 40)
    assert not torch.equal(whole, dense), "a budget that loses something, or the test shows nothing"
    assert torch.equal(by_our_loop(model, ids, config, 40, chunk), whole)


@pytest.mark.parametrize("config", [covering(), covering(top_k=10, candidates=0.5)], ids=["covering", "top 10"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(config: Config, family: str) -> None:
    model = tiny_model(family)
    lengths = [3, 41, 70]
    rows = [prompt(length, seed=length) for length in lengths]
    ids = torch.zeros(3, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (length, own) in enumerate(zip(lengths, rows, strict=True)):
        ids[row, -length:] = own
        mask[row, -length:] = True
    alone = torch.cat([by_our_loop(model, row, config, 50) for row in rows])
    for chunk in (None, 13, 23, 69):  # 70 columns: the last two end in a chunk of one token
        assert torch.equal(by_our_loop(model, ids, config, 50, chunk, mask), alone), f"chunk {chunk}"
    through_generate, _ = generated(model, ids, config, 50, mask)
    assert torch.equal(through_generate.sequences[:, max(lengths) :], alone)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision_stays_within_rounding(dtype: torch.dtype, tolerance: float) -> None:
    """Teacher-forced through generate's first step after the prompt; tokens may flip, logits may not drift."""
    model = tiny_model("llama", dtype)
    ids = prompt(120)
    _, want = dense_generate(model, ids, 2)
    out, _ = generated(model, ids, covering(), 2)
    torch.testing.assert_close(torch.stack(out.logits, 1), want.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_padded_batch_in_tiny_chunks(chunk: int) -> None:
    model = tiny_model("llama")
    ids = prompt(16, batch=2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :9] = False
    want = by_our_loop(model, ids, covering(), 12, None, mask)
    assert torch.equal(by_our_loop(model, ids, covering(), 12, chunk, mask), want)


def test_stages_of_different_retrievers_mix() -> None:
    model = tiny_model("llama")
    ids = prompt(90)
    want, _ = dense_generate(model, ids, NEW)
    config = parse_config(
        {
            "layers": {
                "default": {"retriever": "pariskv", "rerank": "exact", "candidates": 1.0, "top_k": 400},
                "0": {"retriever": "dense"},
                "1": {"coarse_select": "exact", "rerank": "pariskv"},
            },
            "window": {"sink": SINK, "local": LOCAL, "update_interval": U, "dense_below": 0},
        }
    )
    out, cache = generated(model, ids, config)
    assert torch.equal(out.sequences[:, 90:], want)
    assert sorted(cache.request.layers[1].codes) == ["exact", "pariskv"]
    assert cache.request.layers[0].codes == {}


@pytest.mark.parametrize("combine", ["mean_query", "max_logit", "sum_softmax", "max_softmax", "per_query_head"])
def test_every_way_to_combine_a_group_covers_the_history(combine: str) -> None:
    model = tiny_model("gemma2")
    ids = prompt(70)
    want, _ = dense_generate(model, ids, NEW)
    config = parse_config(
        {
            "retrievers": {"oracle": {"type": "exact", "combine": combine}},
            "layers": {"default": {"retriever": "oracle", "candidates": 1.0, "top_k": 400}},
            "window": {"sink": SINK, "local": LOCAL, "update_interval": U, "dense_below": 0},
        }
    )
    out, _ = generated(model, ids, config)
    assert torch.equal(out.sequences[:, 70:], want)


def test_top_k_zero_attends_to_sink_and_ring_alone() -> None:
    model = tiny_model("llama")
    out, cache = generated(model, prompt(90), covering(top_k=0))
    layer = cache.request.layers[0]
    assert layer.zones[0] >= 64
    assert layer.codes == {}
    assert int(layer.selected.sum()) == 0
    want, _ = dense_generate(model, prompt(90), NEW)
    assert not torch.equal(out.sequences[:, 90:], want)


def test_our_loop_ends_each_row_at_its_own_end_of_sequence() -> None:
    model = tiny_model("llama")
    ids = torch.cat((prompt(40, seed=1), prompt(40, seed=2)))
    free = by_our_loop(model, ids, covering(), 40)
    eos = int(free[0, 5])
    lm, batch, cache = language_model(model), Batch(ids), ParisCache(model, covering())
    lm.eos_ids = (eos,)
    logits = prefill(lm, cache, batch, 40)
    steps = list(decode(lm, cache, batch, logits, GenerationConfig(max_new_tokens=40)))
    for row in range(2):
        tokens = free[row].tolist()
        end = tokens.index(eos) + 1 if eos in tokens else 40
        assert [step[row] for step in steps] == (tokens[:end] + [None] * 40)[: len(steps)]
        # The token that ended the row is not written.
        assert cache.request.layers[0].lengths[row] == 40 + end - 1


def test_sampling_gives_a_row_the_same_tokens_in_any_batch() -> None:
    model = tiny_model("llama")
    settings = GenerationConfig(max_new_tokens=20, temperature=0.9, top_p=0.8, seed=3)

    def sampled(ids: Tensor) -> Tensor:
        lm, batch, cache = language_model(model), Batch(ids), ParisCache(model, covering())
        return torch.tensor(list(decode(lm, cache, batch, prefill(lm, cache, batch, 20), settings))).T

    ids = torch.cat((prompt(30, seed=1), prompt(30, seed=2)))
    together = sampled(ids)
    assert torch.equal(together[1:], sampled(ids[1:]))
    assert not torch.equal(together, by_our_loop(model, ids, covering(), 20))
