"""The real default model, through `pariskv run`: it finds what dense attention finds, at dense attention's speed.

By hand, in the environment that `make` made: `python tests/integration/test_smollm2.py` runs eight needles at
4,000 and eight at 7,500 tokens (a quarter of an hour), `... speed` times the quickstart's prompt beside
transformers' own `generate()`. The suite runs one size that fits CI.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from pariskv import Session
from pariskv.cli import main
from pariskv.config import GenerationConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.integrations.models import DEFAULT_MODEL, local_path, resolve_model

ROOT = Path(__file__).parents[2]
DEPTHS = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        local_path(resolve_model(DEFAULT_MODEL)) is None, reason=f"run: pariskv model fetch {DEFAULT_MODEL}"
    ),
]


@pytest.fixture(autouse=True)
def all_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(torch.get_num_threads() if before > 1 else 2)
    yield
    torch.set_num_threads(before)


def needle_run(tokens: int, depth: float, seed: int, *more: str) -> dict[str, Any]:
    """`pariskv run --json` on one needle, dense beside it."""
    arguments = ["run", str(ROOT / "configs/smollm2.yaml"), "window.dense_below=0", "layers.default.top_k=128"]
    arguments += [f"quickstart.prompt_tokens={tokens}", f"quickstart.depth={depth}", f"quickstart.seed={seed}"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*arguments, "--compare", "dense", "--json", "--max-new-tokens", "24", *more])
    return dict(json.loads(out.getvalue()))


def test_the_needle_is_found_as_dense_finds_it() -> None:
    found = needle_run(2000, 0.4, 3)
    assert found["answer_found"] is True
    assert found["compare"]["answer_found"] is True
    assert found["attended_tokens_per_step"] <= 64 + 512 + 128
    assert found["kv_device_bytes"] < found["kv_dense_bytes"]


def test_the_control_without_retrieval_misses_it() -> None:
    assert needle_run(2000, 0.4, 3, "layers.default.top_k=0")["answer_found"] is False


def whole_check() -> None:
    """Eight needles each at 4,000 and 7,500 tokens; a line each, and the counts."""
    for tokens in (4000, 7500):
        ours = dense = 0
        for seed, depth in enumerate(DEPTHS):
            start = time.perf_counter()
            found = needle_run(tokens, depth, seed)
            ours += found["answer_found"]
            dense += found["compare"]["answer_found"]
            print(
                f"{found['prompt_tokens']} tokens, depth {depth}: pariskv {found['answer_found']} "
                f"{found['text'].strip()[:20]!r}, dense {found['compare']['answer_found']}; attended "
                f"{found['attended_tokens_per_step']:.0f}; prefill {found['prefill_tokens_per_s']:.0f} against "
                f"{found['compare']['prefill_tokens_per_s']:.0f}, decode {found['decode_tokens_per_s']:.2f} against "
                f"{found['compare']['decode_tokens_per_s']:.2f} tokens/s; {time.perf_counter() - start:.0f} s",
                flush=True,
            )
        print(f"{tokens} tokens: pariskv found {ours} of {len(DEPTHS)}, dense {dense}", flush=True)


def speed_check(rounds: int = 8, steps: int = 24) -> None:
    """Prefill and decode of the quickstart's prompt beside transformers' own `generate()` with a DynamicCache.

    Which of the two goes first alternates: a machine's speed drifts, and the first to run pays for fresh memory.
    """
    session = Session.load(ROOT / "configs/smollm2.yaml")
    session.model.eos_ids = ()
    batch = session.model.encode([session.needle().prompt])
    session.model.new_cache(session.config).warm_up()
    contenders = [our_times, generate_times]
    rows = []
    for number in range(rounds):
        order = contenders if number % 2 else contenders[::-1]
        times = {contender: contender(session, batch, steps) for contender in order}
        rows.append((*times[our_times], *times[generate_times]))
        print(_speeds(f"round {number + 1}", rows[-1]), flush=True)
    medians = [median(column) for column in zip(*rows, strict=True)]
    print(_speeds(f"median of {rounds}, {batch.tokens.shape[1]} tokens", medians))


def _speeds(what: str, times: Sequence[float]) -> str:
    ours, decode, theirs, generate = times
    return (
        f"{what}: prefill {ours:.2f} s against {theirs:.2f} s ({ours / theirs:.2f} x), "
        f"decode {decode * 1e3:.0f} ms a token against {generate * 1e3:.0f} ms ({generate / decode:.2f} x as fast)"
    )


def our_times(session: Session, batch: Batch, steps: int) -> tuple[float, float]:
    """Seconds to the first token, and the median of a decode step."""
    cache, settings = session.model.new_cache(session.config), GenerationConfig(max_new_tokens=steps)
    times = [time.perf_counter()]
    logits = prefill(session.model, cache, batch, steps)
    for _ in decode(session.model, cache, batch, logits, settings):
        times.append(time.perf_counter())
    return times[1] - times[0], median(later - earlier for earlier, later in pairwise(times[1:]))


def generate_times(session: Session, batch: Batch, steps: int) -> tuple[float, float]:
    from transformers import DynamicCache
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            """Nothing to flush."""

    model, times = session.model.model, []
    model.set_attn_implementation("sdpa")
    model.generate(
        batch.tokens,
        attention_mask=torch.ones_like(batch.tokens),
        cache=DynamicCache(config=model.config),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        streamer=Clock(),
    )
    # The streamer gets the prompt first, then every token.
    return times[1] - times[0], median(later - earlier for earlier, later in pairwise(times[1:]))


if __name__ == "__main__":
    speed_check() if sys.argv[1:] == ["speed"] else whole_check()
