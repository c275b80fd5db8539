"""On a CUDA device, with captured steps over the store `uva`: turns, forks, ragged batches, files, beams and faults.

Every test ends with host memory counted: none of it outlives the requests.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import give_up, raise_beyond
from pariskv_kernels.memory import HostBuffer
from tiny_models import language_model, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache, Session, parse_config
from pariskv.config import Config, RuntimeConfig
from pariskv.conversation import Conversation
from pariskv.decode import Batch, prefill
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.models import LoadedModel
from pariskv.prefix import Prefix, load_prefix, save_prefix
from pariskv.serving.batching import Answer, Ask, Batching
from tests.integration.test_conversation import FORGETFUL, PLAIN, check, said
from tests.integration.test_generate import generate

DEVICE = "cuda"
CAPTURED = RuntimeConfig(graph="on", check_memory=False)  # refuses to run where a step cannot be captured
WINDOW = {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0}
COVERING = {"top_k": 4000, "candidates": 1.0}
LOSSY = {"top_k": 16, "candidates": 0.5}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def host_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Counts the bytes of host memory that stores hold; none are left once a test is over."""
    made: list[weakref.ref[Any]] = []
    allocate = HostBuffer._allocate

    def noting(self: HostBuffer, nbytes: int) -> Any:
        memory = allocate(self, nbytes)
        made.append(weakref.ref(memory))
        return memory

    def live() -> int:
        gc.collect()
        return sum(memory.ends[-1] for ref in made if (memory := ref()) is not None)

    monkeypatch.setattr(HostBuffer, "_allocate", noting)
    yield live
    assert made, "no store in host memory was ever made"
    assert live() == 0


def config_of(layer: dict[str, Any], store: str = "uva") -> Config:
    return parse_config(
        {
            "store": store,
            "layers": {"default": layer},
            "window": WINDOW,
            "generation": {"max_new_tokens": 40},
            "runtime": {"graph": CAPTURED.graph, "check_memory": False},
        }
    )


def a_model(dtype: torch.dtype = torch.float64, family: str = "llama", device: str = "") -> LanguageModel:
    return language_model(tiny_model(family, dtype).to(device or DEVICE))


def read(model: LanguageModel, config: Config, tokens: int = 150) -> Prefix:
    cache, batch = model.new_cache(config), Batch(prompt(tokens).to(model.device))
    return Prefix(cache, batch, prefill(model, cache, batch, config.generation.max_new_tokens))


# Turns and forks


@pytest.mark.parametrize("template", [PLAIN, FORGETFUL], ids=["plain", "forgetful"])
def test_turns_rewound_turns_and_forks_of_a_conversation_equal_fresh_runs(template: str, tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    tokenizer.chat_template = template
    model = tiny_model("llama", torch.float64, vocab_size=40).to(DEVICE)
    session = Session(LanguageModel(LoadedModel(model, tokenizer, "tiny", 2000)), config_of(COVERING))
    chat, texts = Conversation(session, system="w9 w8"), said(9, seed=7)
    for text in texts[:5]:
        check(chat, text)
    assert chat.turn is not None
    assert chat.turn.kept > 0
    chat.rewind(3)
    check(chat, texts[5])
    other = chat.fork()
    for one, text in ((chat, texts[6]), (other, texts[7]), (chat, texts[8])):
        check(one, text)


def test_forks_that_take_turns_equal_their_own_runs_and_hold_the_prefix_once(host_bytes: Callable[[], int]) -> None:
    """Four graphs, replayed in turn, over one base and their own tails."""
    model, config = a_model(torch.float32), config_of(LOSSY)
    questions = [prompt(count, seed=count).to(DEVICE) for count in (9, 1, 21, 5)]

    def asked(prefix: Prefix, question: Tensor) -> Iterator[list[int | None]]:
        prefix.append(model, question, 40)
        return prefix.generate(model, config.generation, CAPTURED)

    alone = [list(asked(read(model, config, 6000), question)) for question in questions]
    assert len({str(one) for one in alone}) == len(questions), "questions that are answered alike prove nothing"
    assert host_bytes() == 0
    first = read(model, config, 6000)
    base = host_bytes()
    forks = [first, *(first.fork(40) for _ in questions[1:])]
    assert host_bytes() == base
    runs = [asked(fork, question) for fork, question in zip(forks, questions, strict=True)]
    together = list(zip(*runs, strict=True))
    assert [list(run) for run in zip(*together, strict=True)] == alone
    assert base < host_bytes() < 1.5 * base


# Batches


def answered(model: LanguageModel, config: Config, asks: Sequence[Ask], rows: int) -> dict[int, Answer]:
    batching = Batching(model, lambda: model.new_cache(config), rows, config.generation, config.runtime)
    return {answer.index: answer for answer in batching.answers(asks)}


@pytest.mark.parametrize("layer", [LOSSY, COVERING], ids=["lossy", "covering"])
def test_a_ragged_batch_whose_rows_are_refilled_equals_single_runs(layer: dict[str, Any]) -> None:
    model, config = a_model(torch.float32), config_of(layer)
    lengths, new = (1, 65, 700, 3000, 65, 3000, 1, 700, 128), (60, 7, 40, 90, 33, 1, 50, 12, 80)
    sizes = enumerate(zip(lengths, new, strict=True))
    asks = [Ask(prompt(length, seed=seed)[0].tolist(), count) for seed, (length, count) in sizes]
    together, alone = (answered(model, config, asks, rows) for rows in (4, 1))
    assert [len(together[index].tokens) for index in range(len(asks))] == list(new)
    assert together == alone


# Files


@pytest.mark.parametrize(("saved_from", "loaded_into"), [("uva", "uva"), ("resident", "uva"), ("uva", "cpu")])
def test_a_saved_prefix_goes_on_in_another_store_token_for_token(
    saved_from: str, loaded_into: str, tmp_path: Path
) -> None:
    model, config = a_model(), config_of(LOSSY, saved_from)
    prefix = read(model, config)
    save_prefix(tmp_path / "p.safetensors", prefix, model)
    want = list(prefix.generate(model, config.generation, CAPTURED))
    on_cpu = loaded_into == "cpu"
    other, runtime = (a_model(device="cpu"), RuntimeConfig()) if on_cpu else (model, CAPTURED)
    store = "resident" if on_cpu else loaded_into
    loaded = load_prefix(tmp_path / "p.safetensors", other, config_of(LOSSY, store))
    assert list(loaded.generate(other, config.generation, runtime)) == want


# transformers' own loops


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_on_the_device_are_those_of_dense_attention_on_the_cpu(family: str) -> None:
    model, ids = tiny_model(family), prompt(60, batch=2)
    beams: dict[str, Any] = {"num_beams": 3, "do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **beams)
    got = generate(model.to(DEVICE), ids.to(DEVICE), ParisCache(model, config_of(COVERING)), num_beams=3)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("retriever", ["exact", "pariskv"])
def test_prompt_lookup_on_the_device_is_plain_decoding_on_the_cpu(retriever: str) -> None:
    model, ids = tiny_model("llama"), prompt(12).repeat(1, 6)  # so that there is something to look up
    layer = {**COVERING, "retriever": retriever}
    want = generate(model, ids, ParisCache(model, config_of(layer, "resident")), new=60)
    cache = ParisCache(model.to(DEVICE), config_of(layer))
    got = generate(model, ids.to(DEVICE), cache, new=60, prompt_lookup_num_tokens=5)
    assert torch.equal(got.cpu(), want)
    assert cache.request.lengths == [ids.shape[1] + 59]


# Faults


def ask_for_everything() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(("fault", "message"), [(give_up, "gave up"), (ask_for_everything, "memory")])
@pytest.mark.parametrize(
    ("stage", "step"),
    [("fetch", 1), ("coarse_select", 2), ("fetch", 2), ("rerank", 2), ("encode", 20), ("update", 20)],
)
def test_a_fault_at_an_eager_or_a_captured_step_ends_its_own_request_only(
    stage: str, step: int, fault: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 runs eagerly, step 2 is captured, and after that what is encoded and stored goes on between replays."""
    model, config = a_model(), config_of(LOSSY)
    asks = [Ask(prompt(150, seed=9)[0].tolist(), 60)]
    asks += [Ask(prompt(40 + 13 * seed, seed=seed)[0].tolist(), 12 + seed) for seed in range(5)]
    wanted = answered(model, config, asks, rows=3)
    is_captured: list[bool] = []

    def noting() -> None:
        is_captured.append(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        fault()

    with monkeypatch.context() as patch:
        raise_beyond(patch, stage, layer=1, tokens=148 + step, fault=noting)
        found = answered(model, config, asks, rows=3)
    others = range(1, len(asks))
    assert {index: found[index] for index in others} == {index: wanted[index] for index in others}
    assert message in found[0].error
    assert "at decode step" in found[0].error
    assert found[0].tokens == wanted[0].tokens[: len(found[0].tokens)]
    assert step <= len(found[0].tokens) < step + 9
    assert is_captured == [step == 2] * 2, "once in the batch, once alone"
    assert answered(model, config, asks, rows=3) == wanted
