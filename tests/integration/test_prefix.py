"""A prefix that was saved goes on as if it had not been, here and in another process, and is refused where it must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import prefix_cases as cases
import pytest
import torch
from prefix_cases import CASES, NEW, a_model, config_of, continued, ids_of, read, saved
from tiny_models import language_model, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache, parse_config
from pariskv.decode import Batch
from pariskv.errors import PluginContractError, PrefixError
from pariskv.integrations.identity import tokenizer_hash
from pariskv.prefix import Prefix, load_prefix, parts, prefix_info, save_prefix

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def other_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """For each case: what the cache that was saved went on with, and what another process did with the file."""
    folder = tmp_path_factory.mktemp("prefixes")
    here = {}
    for name in CASES:
        model, prefix = read(name)
        save_prefix(folder / f"{name}.safetensors", prefix, model)
        here[name] = continued(name, model, prefix)
    done = subprocess.run([sys.executable, cases.__file__, folder], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    return {name: (here[name], there[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_another_process_goes_on_token_for_token(name: str, other_process: dict[str, tuple[Any, Any]]) -> None:
    here, there = other_process[name]
    assert len(here) == NEW
    assert len({token for step in here for token in step}) > 4  # not one token over and over
    assert there == here


def test_saving_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    model, prefix = read("pariskv")
    want = continued("pariskv", model, prefix)
    model, prefix = read("pariskv")
    save_prefix(tmp_path / "a.safetensors", prefix, model)
    assert continued("pariskv", model, prefix) == want


def test_a_tensor_of_many_pieces_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = continued("ragged", *read("ragged"))
    monkeypatch.setattr(parts, "PIECE", 700)  # two tokens of a row: pieces end within sink, zone and ring
    path = saved("ragged", tmp_path)
    model = a_model("ragged")
    assert continued("ragged", model, load_prefix(path, model, config_of("ragged"))) == want


@pytest.mark.parametrize("before", [1, 25])
def test_a_prefix_saved_amid_generation_goes_on_under_generate(before: int, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    config, ids, lm = config_of("pariskv"), prompt(120), language_model(model)

    def generate(tokens: Tensor, cache: ParisCache, new: int) -> Tensor:
        out: Tensor = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), cache=cache, max_new_tokens=new, min_new_tokens=new,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return out

    want = generate(ids, ParisCache(model, config), 50)
    cache = ParisCache(model, config)
    half = generate(ids, cache, before)
    with pytest.raises(PrefixError, match=rf"tokens: the batch has {120 + before} columns .* all but the last"):
        save_prefix(tmp_path / "half.safetensors", Prefix(cache, Batch(half)), lm)
    save_prefix(tmp_path / "half.safetensors", Prefix(cache, Batch(half[:, :-1])), lm)
    loaded = load_prefix(tmp_path / "half.safetensors", lm, config)
    with pytest.raises(PrefixError, match="logits: the prefix was saved without them"):
        next(loaded.generate(lm, config.generation))
    assert torch.equal(generate(half, loaded.cache, 50 - before), want)


@pytest.mark.parametrize("name", ["pariskv", "ragged", "mixed"])
def test_a_question_after_a_loaded_prefix_is_answered_as_after_the_live_one(name: str, tmp_path: Path) -> None:
    model, live = read(name)
    path = saved(name, tmp_path)
    loaded = load_prefix(path, model, config_of(name))
    question = prompt(21, seed=5).expand(live.batch.tokens.shape[0], -1)
    for prefix in (live, loaded):
        prefix.append(model, question, NEW, chunk=8)
        assert prefix.cache.request.lengths == prefix.lengths
    assert loaded.lengths == [length + 21 for length in prefix_info(path).held["rows"]]
    assert continued(name, model, loaded) == continued(name, model, live)


def test_what_the_calibration_said_is_kept(tmp_path: Path) -> None:
    model = a_model("pariskv")
    cache = ParisCache(model.model, config_of("pariskv"))
    moments = {index: torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(index)) for index in range(3)}
    cache.request.request.moments = moments
    path = saved("pariskv", tmp_path, model, cache)
    loaded = load_prefix(path, model, config_of("pariskv"))
    found = loaded.cache.request.request.moments
    assert all(torch.equal(found[index], moments[index]) for index in range(3))


def test_statistics_for_a_later_fit_are_kept(tmp_path: Path) -> None:
    model, prefix = read("ragged")
    path = saved("ragged", tmp_path)
    loaded = load_prefix(path, model, config_of("ragged"))
    for index, layer in prefix.cache.request.layers.items():
        other = loaded.cache.request.layers[index]
        assert layer.queries is not None
        assert other.queries is not None
        assert torch.equal(other.queries.query_moment(), layer.queries.query_moment())
        assert torch.equal(other.queries.recent, layer.queries.recent)
        assert other.queries._seen == layer.queries._seen
        assert other.zone.fitted == layer.zone.fitted


# A plugin's own store and codes


def test_a_plugin_needs_to_do_nothing_for_its_codes_and_store(tmp_path: Path) -> None:
    model, prefix = read("plugin")
    path = saved("plugin", tmp_path)
    loaded = load_prefix(path, model, new_cache=lambda batch: cases.new_cache("plugin", model))
    store = loaded.cache.request.layers[0].store
    assert isinstance(store, cases.ListStore)
    assert continued("plugin", model, loaded) == continued("plugin", model, prefix)


def test_a_stores_own_state_comes_back(tmp_path: Path) -> None:
    """ShadowKV's basis, which its store learnt from the prompt."""
    model = a_model("pariskv")
    config = parse_config(
        {
            "layers": {"default": {"retriever": "shadowkv", "top_k": 16}, "1-2": {"retriever": "dense"}},
            "retrievers": {"shadowkv": {"rank": 8, "outliers": 2}},
            "window": {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0},
        }
    )
    path = saved("pariskv", tmp_path, model, live := ParisCache(model.model, config))
    loaded = load_prefix(path, model, config).cache.request.layers[0].store
    before = live.request.layers[0].store
    assert before is not None
    assert loaded is not None
    state, found = before.state(), loaded.state()
    assert set(state) == set(found) == {"learnt", "basis", "coefficients", "exact_keys", "exact_starts"}
    assert all(torch.equal(state[key], found[key]) for key in state)
    with pytest.raises(PluginContractError, match=r"ListStore: got the state .*'basis'.* implements no restore"):
        cases.ListStore(live.request.layers[0].info, 8).restore(state, None)


def test_rows_that_were_not_kept_are_not_made_up(tmp_path: Path) -> None:
    path = saved("evict", tmp_path)
    model = a_model("evict")
    with pytest.raises(PrefixError, match=r"layers\.0\.store: saved from a store that keeps no rows.*ResidentStore"):
        load_prefix(path, model, config_of("evict", {"store": "resident"}))


def test_what_cannot_be_saved_is_told() -> None:
    model = a_model("pariskv")
    cache = ParisCache(model.model, config_of("pariskv"))
    with pytest.raises(PrefixError, match="holds no token yet"):
        save_prefix("never.safetensors", Prefix(cache, Batch(ids_of("pariskv")[0])), model)
    _, prefix = read("ragged")
    prefix.cache.set_active([True, False, True])
    with pytest.raises(PrefixError, match="a row has ended"):
        save_prefix("never.safetensors", prefix, model)


# Refusals, by the name of the field


def changed(**changes: Any) -> Any:
    return config_of("pariskv", changes)


CONFIGURATIONS = {
    "layers.0.top_k": lambda: changed(layers={"default": {"top_k": 17}}),
    "layers.0.candidates": lambda: changed(layers={"default": {"top_k": 16, "candidates": 40}}),
    "layers.2.stages.rerank": lambda: changed(layers={"default": {"top_k": 16}, "2": {"rerank": "exact"}}),
    "layers.0.window.local": lambda: changed(window={"local": 9}),
    "retrievers.pariskv.options.seed": lambda: changed(retrievers={"pariskv": {"seed": 43}}),
    "retrievers.pariskv.options.combine": lambda: changed(retrievers={"pariskv": {"combine": "max_logit"}}),
    "retrievers.quest": lambda: changed(layers={"default": {"retriever": "quest", "top_k": 16}}),
}


@pytest.mark.parametrize("field", CONFIGURATIONS)
def test_another_configuration_is_refused_by_name(field: str, tmp_path: Path) -> None:
    path, model = saved("pariskv", tmp_path), a_model("pariskv")
    with pytest.raises(PrefixError) as refused:
        load_prefix(path, model, CONFIGURATIONS[field]())
    text = str(refused.value)
    assert f"{field}: saved " in text
    assert str(path) in text
    assert "load it with the configuration that it was saved with" in text


def test_another_model_tokenizer_text_or_file_is_refused_by_name(tmp_path: Path) -> None:
    path, config = saved("pariskv", tmp_path), config_of("pariskv")

    def refusal(model: Any = None, **more: Any) -> str:
        with pytest.raises(PrefixError) as refused:
            load_prefix(path, model or a_model("pariskv"), config, **more)
        return str(refused.value)

    other = language_model(tiny_model("llama", torch.float32, seed=1))
    assert "model.fingerprint: the prefix does not belong here: model.fingerprint: saved" in refusal(other)
    assert "model.dtype: saved float32, here float64" in refusal(language_model(tiny_model("llama")))
    assert "model.class: saved LlamaForCausalLM, here Qwen3ForCausalLM" in refusal(
        language_model(tiny_model("qwen3", torch.float32))
    )
    turned = language_model(
        tiny_model("llama", torch.float32, rope_parameters={"rope_type": "default", "rope_theta": 5})
    )
    assert "model.rope_parameters.rope_theta: saved 10000.0, here 5" in refusal(turned)
    renamed = a_model("pariskv")
    renamed.model.config.name_or_path = "/models/elsewhere"
    assert "model.id: saved nothing, here elsewhere" in refusal(renamed)
    revised = a_model("pariskv")
    revised.model.config._commit_hash = "f" * 40
    assert f"model.revision: saved nothing, here {'f' * 40}" in refusal(revised)
    worded = a_model("pariskv")
    worded.tokenizer = cases.Words({"a": 0})
    assert f"tokenizer: saved nothing, here {tokenizer_hash(worded.tokenizer)}" in refusal(worded)
    assert "tokens: the prefix is of another text" in refusal(tokens=Batch(prompt(5)))
    assert "sha256: wanted abc" in refusal(sha256="abc")
    load_prefix(path, a_model("pariskv"), config, sha256=prefix_info(path).sha256, tokens=Batch(*ids_of("pariskv")))


def test_a_tokenizers_hash_is_of_its_vocabulary() -> None:
    assert tokenizer_hash(cases.Words({"a": 0})) != tokenizer_hash(cases.Words({"a": 0, "b": 1}))
