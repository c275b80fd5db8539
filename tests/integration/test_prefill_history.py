"""A prompt read over the store: the model gives what one chunk in a buffer gives, and says how it was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pre_rope import PreRope, offered
from tiny_models import dense_generate, language_model, prompt, tiny_model
from torch import Tensor

from pariskv import ParisCache, Session, history, memory, parse_config
from pariskv.cli import main
from pariskv.config import Config, GenerationConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.errors import CapacityError
from pariskv.registry import Registry

CHUNKS = [1, 7, 64, None]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}
NEW = 20


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone of several blocks, the last of them cut short."""
    monkeypatch.setattr(history, "BLOCK", 24)


def lossy(way: str, dense_below: int = 0, layers: dict[str, Any] | None = None) -> Config:
    """A selection that leaves most of the zone out: what is decoded depends on codes, store and zone."""
    return parse_config(
        {
            "layers": {"default": {"top_k": 16, "candidates": 0.5}, **(layers or {})},
            "window": {"sink": 4, "local": 8, "update_interval": 8, "dense_below": dense_below},
            "prefill": {"history": way},
        }
    )


def run(
    model: Any,
    ids: Tensor,
    config: Config,
    chunk: int | None,
    mask: Tensor | None = None,
    registry: Registry | None = None,
) -> tuple[Tensor, Tensor, ParisCache]:
    """Logits after the prompt, the tokens that follow, and the cache."""
    lm, batch, cache = language_model(model), Batch(ids, mask), ParisCache(model, config, registry)
    logits = prefill(lm, cache, batch, NEW, chunk)
    steps = list(decode(lm, cache, batch, logits, GenerationConfig(max_new_tokens=NEW)))
    return logits, torch.tensor(steps).T, cache


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_a_prompt_over_the_store_gives_what_one_chunk_in_a_buffer_gives(family: str, chunk: int | None) -> None:
    model = tiny_model(family)
    want_logits, want, buffered = run(model, prompt(150), lossy("buffer"), None)
    logits, tokens, streamed = run(model, prompt(150), lossy("store"), chunk)
    torch.testing.assert_close(logits, want_logits, rtol=0, atol=TOLERANCE[torch.float64])
    assert torch.equal(tokens, want)
    assert (buffered.request.prefill_history, streamed.request.prefill_history) == ("buffer", "store")
    assert min(zone for layer in streamed.request.layers.values() for zone in layer.zones) >= 120


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_in_float32_and_for_the_buffer_in_chunks(family: str, chunk: int | None) -> None:
    model = tiny_model(family, torch.float32)
    want, _, _ = run(model, prompt(150), lossy("buffer"), None)
    for way in ("buffer", "store"):
        logits, _, _ = run(model, prompt(150), lossy(way), chunk)
        torch.testing.assert_close(logits, want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_rows_of_a_ragged_batch_are_read_as_if_alone(family: str, chunk: int | None) -> None:
    model = tiny_model(family)
    ids, pads = prompt(100, batch=3), [0, 31, 97]
    mask = torch.arange(100) >= torch.tensor(pads).unsqueeze(-1)
    _, together, _ = run(model, ids, lossy("store"), chunk, mask)
    for row, pad in enumerate(pads):
        _, alone, _ = run(model, ids[row : row + 1, pad:], lossy("buffer"), None)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("length", [1, 2, 4, 12, 20])
def test_prompts_shorter_than_the_window(length: int) -> None:
    model = tiny_model("llama")
    _, want, _ = run(model, prompt(length), lossy("buffer"), None)
    for chunk in (1, 3, None):
        _, tokens, _ = run(model, prompt(length), lossy("store"), chunk)
        assert torch.equal(tokens, want)


@pytest.mark.parametrize("length", [70, 79, 80, 81, 130])
def test_rows_below_dense_below_stay_on_the_device_until_they_pass_it(length: int) -> None:
    model = tiny_model("llama")
    _, want, _ = run(model, prompt(length), lossy("buffer", 80), None)
    for chunk in (7, 64):
        _, tokens, cache = run(model, prompt(length), lossy("store", 80), chunk)
        assert torch.equal(tokens, want)
        assert max(cache.request.layers[0].zones) >= (64 if length >= 80 else 0)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_format_that_needs_keys_before_rope_gets_the_same(chunk: int | None) -> None:
    model, seen = tiny_model("llama"), []
    for way, size in (("buffer", None), ("store", chunk)):
        probe = PreRope()
        config = lossy(way, layers={"default": {"retriever": "exact", "encode": "probe", "top_k": 16}})
        run(model, prompt(100), config, size, registry=offered(probe))
        seen.append(probe.seen)
    assert sorted(seen[0]) == sorted(seen[1]) == [0, 1, 2]
    for layer, keys in seen[0].items():
        torch.testing.assert_close(seen[1][layer], keys, rtol=0, atol=1e-9)


@torch.no_grad()
def test_only_layers_without_a_store_grow_on_the_device() -> None:
    model = tiny_model("llama")
    config = lossy("store", layers={"1": {"retriever": "dense"}})
    _, want, _ = run(model, prompt(150), lossy("buffer", layers={"1": {"retriever": "dense"}}), None)
    _, tokens, cache = run(model, prompt(150), config, 16)
    assert torch.equal(tokens, want)
    assert [cache.request.layers[index].prefill_history for index in range(3)] == ["store", "buffer", "store"]
    assert cache.request.prefill_history == "store"
    held = []
    for length in (96, 288):
        cache = ParisCache(model, config)
        cache.begin_prefill(length, NEW)
        for start in range(0, length, 32):
            language_model(model).forward(
                prompt(length)[:, start : start + 32], torch.arange(start, start + 32)[None], None, cache
            )
        prompts = [cache.request.layers[index].prompt for index in range(3)]
        held.append([part.nbytes for part in prompts if part is not None])
    assert held[0][0] == held[1][0] == held[0][2]
    assert 3 * held[0][1] == held[1][1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_generate_takes_turns_over_the_store(family: str) -> None:
    """Chunks of generate's own, then a later turn; the selection covers everything, so the tokens are dense ones."""
    model = tiny_model(family)
    config = parse_config(
        {
            "layers": {"default": {"candidates": 1.0, "top_k": 400}},
            "window": {"sink": 4, "local": 8, "update_interval": 8, "dense_below": 0},
            "prefill": {"history": "store"},
        }
    )
    cache = ParisCache(model, config)
    arguments = {"cache": cache, "do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW, "min_new_tokens": NEW}
    ids = prompt(70)
    for seed in (3, 4):
        got = model.generate(ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=20, **arguments)
        want, _ = dense_generate(model, ids, NEW)
        assert torch.equal(got[:, ids.shape[1] :], want)
        ids = torch.cat((got, prompt(31, seed=seed)), dim=1)
    assert cache.request.prefill_history == "store"


# Who says which ran

WORDS = " ".join(f"w{1 + i % 39}" for i in range(150))


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{name: {folder}}}\ngeneration: {{max_new_tokens: 20}}\nlayers: {{default: {{top_k: 16}}}}\n"
        "window: {sink: 4, local: 8, update_interval: 8, dense_below: 0}\nprefill: {chunk: 20}\n"
    )
    return path


def test_auto_reads_over_the_store_where_the_buffer_does_not_fit(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.load(config)
    cache = session.model.new_cache(session.config)
    need = {way: cache.planner.estimate(1, 150, 20, way).peak for way in ("buffer", "store")}  # type: ignore[arg-type]
    assert need["store"] < need["buffer"]
    texts = set()
    for free, way in ((need["buffer"], "buffer"), (need["buffer"] - 1, "store"), (need["store"], "store")):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        run = session.run(WORDS)
        assert run.report is not None
        assert run.report.prefill_history == way
        texts.add(run.text)
    assert len(texts) == 1
    monkeypatch.setattr(memory, "available_bytes", lambda device: need["store"] - 1)
    with pytest.raises(CapacityError, match="not enough memory"):
        session.run(WORDS)


@pytest.mark.parametrize("way", ["buffer", "store"])
def test_the_report_and_its_table_say_which_ran(config: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(config), f"prefill.history={way}", "--prompt", WORDS, "--compare", "dense"]
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["prefill_history"] == way
    assert found["compare"]["prefill_history"] is None
    with pytest.raises(SystemExit):
        main(arguments)
    line = next(line for line in capsys.readouterr().out.splitlines() if "earlier chunks" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][1:] == [way, "-"]
