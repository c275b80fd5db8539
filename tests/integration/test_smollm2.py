"""The real default model, through `pariskv run`: it finds what dense attention finds, at dense attention's speed.

The whole check (`python tests/integration/test_smollm2.py`, a quarter of an hour) runs eight needles at
4,000 and at 7,500 tokens; the suite runs one size that fits CI.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pariskv.cli import main
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


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "plugins"), str(ROOT / "kernels")]
    whole_check()
