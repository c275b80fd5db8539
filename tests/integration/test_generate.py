"""`model.generate(..., cache=ParisCache(...))`: streaming, sampling, batches, later turns, refusals."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from pariskv_plugins.resident import ResidentStore
from pre_rope import PreRope, offered, projected_keys
from tiny_models import SIZES, dense_generate, language_model, prompt, tiny_model

from pariskv import ParisCache, parse_config
from pariskv.config import GenerationConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.errors import BindingError, ModelError
from pariskv.integrations.transformers import paris_mask

WINDOW_OF_8 = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
CONFIG = parse_config({"layers": {"default": {"candidates": 1.0, "top_k": 400}}, "window": WINDOW_OF_8})


def generate(model: Any, ids: torch.Tensor, cache: ParisCache, new: int = 30, **more: Any) -> torch.Tensor:
    arguments = {"do_sample": False, "min_new_tokens": new, "pad_token_id": 0, **more}
    mask = arguments.pop("attention_mask", torch.ones_like(ids))
    out: torch.Tensor = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=new, **arguments)
    return out


def test_sampling_with_a_seed_draws_what_dense_draws() -> None:
    model = tiny_model("llama")
    arguments = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    torch.manual_seed(7)
    model.set_attn_implementation("eager")
    want = model.generate(
        prompt(60), attention_mask=torch.ones(1, 60), max_new_tokens=30, min_new_tokens=30, pad_token_id=0, **arguments
    )
    torch.manual_seed(7)
    assert torch.equal(generate(model, prompt(60), ParisCache(model, CONFIG), **arguments), want)


def test_a_streamer_gets_every_token_and_the_end() -> None:
    model = tiny_model("llama")
    got: list[int] = []
    ended = threading.Event()

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            got.extend(value.flatten().tolist())

        def end(self) -> None:
            ended.set()

    out = generate(model, prompt(40), ParisCache(model, CONFIG), streamer=Streamer())
    assert got == out[0].tolist()
    assert ended.is_set()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_second_turn_on_the_same_cache_equals_dense(family: str) -> None:
    model = tiny_model(family)
    cache = ParisCache(model, CONFIG)
    first = generate(model, prompt(50), cache)
    turn = torch.cat((first, prompt(21, seed=5)), dim=1)
    want, _ = dense_generate(model, turn, 30)
    got = generate(model, turn, cache)
    assert torch.equal(got[:, turn.shape[1] :], want)
    again = torch.cat((got, prompt(1, seed=6)), dim=1)
    want, _ = dense_generate(model, again, 30)
    assert torch.equal(generate(model, again, cache)[:, again.shape[1] :], want)


def test_a_prompt_in_chunks_of_generates_own_equals_dense() -> None:
    model = tiny_model("llama")
    want, _ = dense_generate(model, prompt(61), 30)
    got = generate(model, prompt(61), ParisCache(model, CONFIG), prefill_chunk_size=20)
    assert torch.equal(got[:, 61:], want)


def test_rows_end_at_their_own_end_of_sequence_token() -> None:
    model = tiny_model("llama")
    ids = torch.cat((prompt(40, seed=1), prompt(40, seed=2)))
    free = generate(model, ids, ParisCache(model, CONFIG), 40)[:, 40:]
    eos = int(free[0, 5])
    got = generate(model, ids, ParisCache(model, CONFIG), 40, min_new_tokens=None, eos_token_id=eos)[:, 40:]
    for row in range(2):
        tokens = free[row].tolist()
        end = tokens.index(eos) + 1 if eos in tokens else 40
        assert got[row, :end].tolist() == tokens[:end]
        assert set(got[row, end:].tolist()) <= {0}


def test_a_reset_cache_serves_another_request() -> None:
    model = tiny_model("llama")
    cache = ParisCache(model, CONFIG)
    first = generate(model, prompt(50), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, prompt(50), cache), first)


def test_nothing_of_a_request_with_ended_rows_outlives_a_reset() -> None:
    model = tiny_model("llama")
    ids = prompt(40, batch=2)
    fresh = generate(model, ids, ParisCache(model, CONFIG))
    cache = ParisCache(model, CONFIG)
    generate(model, ids, cache, 3)
    cache.set_active([True, False])
    cache.reset()
    assert torch.equal(generate(model, ids, cache), fresh)
    cache.reset()
    assert generate(model, prompt(20, batch=3), cache).shape == (3, 50)


def test_a_second_turn_where_every_row_is_padded() -> None:
    model = tiny_model("llama")
    cache = ParisCache(model, CONFIG)
    ids = torch.cat((torch.zeros(1, 3, dtype=torch.long), prompt(37)), dim=1)
    mask = (torch.arange(40) >= 3).long().unsqueeze(0)
    first = generate(model, ids, cache, 20, attention_mask=mask)
    turn = torch.cat((first, prompt(9, seed=4)), dim=1)
    got = generate(model, turn, cache, 20, attention_mask=torch.cat((mask, torch.ones(1, 29).long()), dim=1))
    want, _ = dense_generate(model, turn[:, 3:], 20)
    assert torch.equal(got[:, turn.shape[1] :], want)


def test_padding_that_goes_through_one_token_at_a_time_is_refused() -> None:
    model = tiny_model("llama")
    mask = (torch.arange(20) >= torch.tensor([[0], [3]])).long()
    with pytest.raises(ModelError, match="prefill_chunk_size > 1"):
        generate(model, prompt(20, batch=2), ParisCache(model, CONFIG), attention_mask=mask, prefill_chunk_size=1)


def test_gradients_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=r"torch\.no_grad"):
        model(prompt(5), cache=ParisCache(model, CONFIG))


def test_our_loop_and_generate_take_turns_on_one_cache() -> None:
    model = tiny_model("llama")
    cache = ParisCache(model, CONFIG)
    lm, batch = language_model(model), Batch(prompt(40))
    logits = prefill(lm, cache, batch, 10)
    first = torch.tensor(list(decode(lm, cache, batch, logits, GenerationConfig(max_new_tokens=10)))).T
    turn = torch.cat((prompt(40), first, prompt(7, seed=3)), dim=1)
    want, _ = dense_generate(model, turn, 20)
    assert torch.equal(generate(model, turn, cache, 20)[:, 57:], want)
    with pytest.raises(ModelError, match="holds a request already"):
        prefill(lm, cache, batch, 10)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_our_attention_is_dense_for_any_other_cache_with_padding(family: str) -> None:
    """One decoded token of a padded row must not see the padding, whoever holds the cache."""
    model = tiny_model(family)
    ids = torch.cat((torch.zeros(1, 3, dtype=torch.long), prompt(37)), dim=1)
    mask = (torch.arange(40) >= 3).long().unsqueeze(0)
    want, _ = dense_generate(model, prompt(37), 20)
    ParisCache(model, CONFIG)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert torch.equal(out[:, 40:], want)


def test_our_attention_is_dense_for_any_other_cache() -> None:
    model = tiny_model("gemma2")
    want, _ = dense_generate(model, prompt(50), 20)
    ParisCache(model, CONFIG)
    out = model.generate(
        prompt(50),
        attention_mask=torch.ones(1, 50),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
    )
    assert model.config._attn_implementation == "pariskv"
    assert torch.equal(out[:, 50:], want)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("padded", [False, True])
def test_our_attention_is_dense_for_a_static_cache_whose_rows_go_on_behind_the_tokens(
    family: str, padded: bool
) -> None:
    model, ids = tiny_model(family), prompt(40, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0 if padded else 1
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("sdpa")
    want = model.generate(ids, **arguments)
    ParisCache(model, CONFIG)
    out = model.generate(ids, cache_implementation="static", disable_compile=True, **arguments)
    assert model.config._attn_implementation == "pariskv"
    assert torch.equal(out, want)


def test_two_caches_of_one_model_do_not_mix() -> None:
    model = tiny_model("llama")
    one, two = ParisCache(model, CONFIG), ParisCache(model, CONFIG)
    with torch.no_grad():
        for start in range(0, 60, 20):
            for cache, seed in ((one, 1), (two, 2)):
                model(prompt(60, seed)[:, start : start + 20], cache=cache)
        got = [model(torch.tensor([[5]]), cache=cache).logits for cache in (one, two)]
        want = [model(torch.cat((prompt(60, seed), torch.tensor([[5]])), 1)).logits[:, -1:] for seed in (1, 2)]
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_beam_search_finds_the_beams_of_dense_attention(family: str, rows: int) -> None:
    """All rows of the zone are fetched, so that the beams are those of transformers' own cache."""
    model, ids = tiny_model(family), prompt(60, batch=rows)
    model.set_attn_implementation("eager")
    arguments = {"num_beams": 3, "do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30, "pad_token_id": 0}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    got = generate(model, ids, ParisCache(model, CONFIG), num_beams=3)
    assert torch.equal(got, want)


def test_beams_take_their_tails_with_them_and_leave_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once two beams are known to begin alike, only what they do not have in common is copied."""
    copied: list[int] = []
    update = ResidentStore.append

    def counting(self: ResidentStore, keys: torch.Tensor, *more: Any) -> None:
        copied.append(keys.shape[2])
        update(self, keys, *more)

    model = tiny_model("llama", num_hidden_layers=1)
    cache = ParisCache(model, CONFIG)
    with torch.no_grad():
        cache.begin_prefill(200, 60)
        model(prompt(200).repeat(3, 1), cache=cache)
        cache.end_prefill()
        monkeypatch.setattr(ResidentStore, "append", counting)
        cache.reorder_cache(torch.tensor([0, 0, 0]))
        first = sum(copied)
        assert first >= 2 * 180  # nothing was known of them
        for order in ([1, 2, 0], [2, 2, 1], [0, 0, 2], [1, 0, 2]):
            for _ in range(8):
                model(torch.tensor([[3], [5], [7]]), cache=cache)
                cache.end_step()
            cache.reorder_cache(torch.tensor(order))
    assert sum(copied) - first < 3 * 200 + 3 * 40 * 4  # the row beside the batch once, and tails


@pytest.mark.parametrize("retriever", ["dense", "exact", "pariskv"])
def test_prompt_lookup_generates_what_plain_decoding_does(retriever: str) -> None:
    """Drafts are verified as the decode steps they would have been; those that were wrong are taken back."""
    model = tiny_model("llama", torch.float64)
    ids = prompt(12).repeat(1, 6)  # so that there is something to look up
    layer = {"retriever": retriever, "candidates": 1.0, "top_k": 400}
    config = parse_config({"layers": {"default": layer}, "window": WINDOW_OF_8})
    want = generate(model, ids, ParisCache(model, config), new=60)
    cache = ParisCache(model, config)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.register_forward_hook(count)
    got = generate(model, ids, cache, new=60, prompt_lookup_num_tokens=5)
    handle.remove()
    assert torch.equal(got, want)
    assert forwards < 60, "no draft was ever right, so nothing was verified"
    assert cache.request.lengths == [ids.shape[1] + 59]


def test_a_cache_goes_back_to_an_earlier_turn() -> None:
    """crop(-n), then other tokens: as if the first had never been there. Through zone, ring and sink."""
    model = tiny_model("llama")
    for left in (150, 100, 41, 7, 1):
        cache, fresh = ParisCache(model, CONFIG), ParisCache(model, CONFIG)
        generate(model, prompt(160), cache, new=20)
        cache.crop(left - cache.get_seq_length())
        assert cache.get_seq_length() == left
        ids = torch.cat((prompt(160)[:, :left], prompt(30, seed=5)), dim=1)
        assert torch.equal(generate(model, ids, cache), generate(model, ids, fresh))


def test_a_sliding_window_goes_back_while_it_is_told_to_remember() -> None:
    model = tiny_model("gemma3")
    cache, fresh = ParisCache(model, CONFIG), ParisCache(model, CONFIG)
    with torch.no_grad():
        model(prompt(60), cache=cache)
        cache.activate_past_recording()
        model(prompt(9, seed=3), cache=cache)
        cache.crop(-9)
    ids = torch.cat((prompt(60), prompt(12, seed=4)), dim=1)
    assert torch.equal(generate(model, ids, cache), generate(model, ids, fresh))


@pytest.mark.parametrize("retriever", ["pariskv", "exact"])
def test_a_turn_with_retrieved_history_is_the_decode_steps_it_stands_for(retriever: str) -> None:
    model, turn = tiny_model("llama"), prompt(20, seed=9)
    layer = {"retriever": retriever, "top_k": 6}
    values = {"layers": {"default": layer}, "window": WINDOW_OF_8}
    at_once = ParisCache(model, parse_config({**values, "prefill": {"turns": "retrieved"}}))
    step_by_step, dense = ParisCache(model, parse_config(values)), ParisCache(model, parse_config(values))
    with torch.no_grad():
        for cache in (at_once, step_by_step, dense):
            cache.begin_prefill(150, 60)
            model(prompt(150), cache=cache)
            cache.end_prefill()
        got = model(turn, cache=at_once).logits
        want = torch.cat([model(turn[:, i : i + 1], cache=step_by_step).logits for i in range(20)], dim=1)
        whole = model(turn, cache=dense).logits
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, whole), "dense reading of the turn must differ, or this test shows nothing"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_of_a_used_cache_are_repeated_and_selected(family: str) -> None:
    model, ids = tiny_model(family, torch.float64), torch.cat([prompt(60, seed=seed) for seed in range(2)])
    cache = ParisCache(model, CONFIG)
    cache.batch_repeat_interleave(3)  # of nothing, as before a first prompt
    generate(model, ids, cache, 20)
    held = generate(model, ids, ParisCache(model, CONFIG), 20)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1, 2, 3]))
    turn = torch.cat((held[[1, 0, 0, 1, 1]], torch.cat([prompt(9, seed=seed) for seed in range(5)])), dim=1)
    want, _ = dense_generate(model, turn, 30)
    assert torch.equal(generate(model, turn, cache)[:, turn.shape[1] :], want)
    assert cache.get_seq_length() == 60 + 20 + 9 + 29


def test_another_batch_on_a_used_cache_is_refused() -> None:
    model = tiny_model("llama")
    cache = ParisCache(model, CONFIG)
    generate(model, prompt(20), cache)
    with pytest.raises(ModelError, match=r"holds 1 rows.*make a new ParisCache"), torch.no_grad():
        model(prompt(3, batch=2), cache=cache)


def test_right_padding_is_refused() -> None:
    model = tiny_model("llama")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    with pytest.raises(ModelError, match="padding on the left"):
        generate(model, prompt(20, batch=2), ParisCache(model, CONFIG), attention_mask=mask)


def tiny(name: str, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_multi_head_latent_attention_is_refused_by_name() -> None:
    model = tiny(
        "DeepseekV3",
        num_key_value_heads=6,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        first_k_dense_replace=3,
    )
    with pytest.raises(ModelError, match=r"DeepseekV3ForCausalLM uses multi-head latent attention \(kv_lora_rank=16\)"):
        ParisCache(model, CONFIG)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        ParisCache(transformers.T5ForConditionalGeneration(config), CONFIG)


def test_a_model_off_the_attention_interface_is_refused_by_name() -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match=r"BloomForCausalLM.*AttentionInterface"):
        ParisCache(transformers.BloomForCausalLM(config), CONFIG)


def test_a_model_with_sliding_windows_only_has_nothing_to_retrieve() -> None:
    with pytest.raises(ModelError, match=r"MistralForCausalLM has no full-attention layer.*sliding_attention"):
        ParisCache(tiny_model("mistral", sliding_window=16), CONFIG)


def test_keys_that_the_model_changes_after_the_cache_are_noticed() -> None:
    model = tiny_model("llama")
    cache = ParisCache(model, CONFIG)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(prompt(20), cache=cache)
        with pytest.raises(ModelError, match="changed the keys after the cache"):
            model(prompt(1), cache=cache)


def test_the_mask_of_one_decoded_token_needs_no_look_at_the_padding() -> None:
    padding = torch.tensor([[False, True, True]])
    arguments = {"batch_size": 1, "kv_length": 3, "attention_mask": padding}
    mask = paris_mask(q_length=1, q_offset=2, **arguments)
    assert mask is not None
    assert torch.equal(mask, padding.view(1, 1, 1, 3))
    assert mask.data_ptr() == padding.data_ptr()
    assert paris_mask(q_length=1, q_offset=2, batch_size=1, kv_length=3) is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_keys_before_rope_come_from_the_models_own_rotary_embedding(family: str) -> None:
    """`fit` gets what the projection made: compared with a hook on k_proj (qkv_proj) itself."""
    model = tiny_model(family)
    probe = PreRope()
    config = parse_config(
        {
            "layers": {"default": {"retriever": "exact", "encode": "probe"}},
            "window": {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0},
        }
    )
    cache = ParisCache(model, config, offered(probe))
    with projected_keys(model) as keys:
        generate(model, prompt(50), cache, 2)
    for layer, seen in probe.seen.items():
        zone = seen.shape[1]
        # The model's cosines and sines are float32.
        torch.testing.assert_close(seen, keys[layer][:, 4 : 4 + zone], rtol=0, atol=1e-6)
    assert sorted(probe.seen) == [0, 1, 2]
    assert zone == 32


def test_a_model_without_one_rotary_embedding_refuses_a_format_that_needs_keys_before_it() -> None:
    config = parse_config({"layers": {"default": {"retriever": "exact", "encode": "probe"}}})
    with pytest.raises(BindingError, match=r"probe needs keys before RoPE, but Gemma3ForCausalLM"):
        ParisCache(tiny_model("gemma3"), config, offered(PreRope()))
