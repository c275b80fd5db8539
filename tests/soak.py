"""Mixed requests through `pariskv run --prompts`, killed in the middle and resumed; each compared with its own run.

    PYTHONPATH=.:plugins:kernels python tests/soak.py --requests 500 --longest 6000

Prompts of 1 to `--longest` tokens with bad lines among them, a tiny random model of its own, memory sampled from the
kernel while the processes run. `integration/test_soak.py` has the short version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root / folder) for folder in (".", "plugins", "kernels", "tests")]

import torch

from pariskv import Session

WORDS = 60
CONFIG = """\
model: {{name: {folder}, dtype: float32}}
window: {{sink: 4, local: 16, update_interval: 16, dense_below: 64}}
layers: {{default: {{top_k: 32}}}}
"""
BAD = {
    "not json": "no JSON in UTF-8",
    "[1, 2]": "wanted a JSON object or string",
    '{"prompt": ""}': 'wanted "prompt"',
    '{"prompt": "w1", "max_new_tokens": 0}': '"max_new_tokens": got 0',
    json.dumps({"prompt": "w1 " * 9000}): "the model's context is 8192",
}
"""Lines that cannot be answered, and what their errors say."""

EDGE = 20
"""Samples at the beginning and at the end of a process that are compared; the least of them counts."""


def make_model(folder: Path) -> None:
    """A random llama of two layers and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "embed" in name:
                weight.mul_(20.0)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@dataclass(frozen=True)
class Line:
    """A line of the file; `error` is a part of the one that it must get."""

    text: str
    prompt: str = ""
    new_tokens: int = 0
    error: str = ""


def make_lines(count: int, longest: int, most_new: int, seed: int = 0) -> list[Line]:
    """Every twentieth is bad; the first good ones have 1 token and the most."""
    draw, bad, lines = random.Random(seed), list(BAD.items()), list[Line]()
    for index in range(count):
        if index % 20 == 7:
            text, error = bad[index // 20 % len(bad)]
            lines.append(Line(text, error=error))
            continue
        tokens = (1, longest)[index] if index < 2 else draw.randint(1, longest)
        prompt, new = " ".join(f"w{draw.randrange(WORDS)}" for _ in range(tokens)), draw.randint(1, most_new)
        lines.append(Line(json.dumps({"prompt": prompt, "max_new_tokens": new}), prompt, new))
    return lines


@dataclass(frozen=True)
class Ran:
    """A process: its exit code (negative: killed by that signal), and the bytes that it had resident as it went."""

    code: int
    resident: list[int]

    @property
    def begin(self) -> int:
        return min(self.resident[:EDGE])

    @property
    def end(self) -> int:
        return min(self.resident[-EDGE:])


def run(arguments: Sequence[str], journal: Path, warm: int, kill_at: int | None = None) -> Ran:
    """`pariskv run`, killed without notice once the journal has so many lines.

    warm  results after which memory is sampled: bad lines, which come first, and some batches of others
    """
    code = "import sys; from pariskv.cli import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    resident: list[int] = []
    with subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment) as process:
        before = done = lines_of(journal)
        while process.poll() is None:
            if (now := lines_of(journal)) > done and now > before + warm:
                done = now
                resident.append(resident_bytes(process.pid))
            if kill_at is not None and now >= kill_at:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
    return Ran(process.returncode, [one for one in resident if one])


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def resident_bytes(process: int) -> int:
    """What the process has in memory; 0 where it has just ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def differences(lines: Sequence[Line], results: Sequence[dict[str, Any]], session: Session) -> list[str]:
    """What is lost, doubled, out of order, or other than what the line's own run gives."""
    if [result["index"] for result in results] != list(range(len(lines))):
        return [f"wanted the results 0 to {len(lines) - 1} in order, got {[result['index'] for result in results]}"]
    wrong = []
    for index, (line, result) in enumerate(zip(lines, results, strict=True)):
        if line.error:
            if line.error not in result.get("error", ""):
                wrong.append(f"{index}: wanted an error with {line.error!r}, got {result}")
            continue
        generation = replace(session.config.generation, max_new_tokens=line.new_tokens)
        session.config = replace(session.config, generation=generation)
        alone = session.generate([line.prompt])[0]
        if result.get("text") != alone:
            wrong.append(f"{index}: {len(line.prompt.split())} tokens, wanted {alone!r}, got {result}")
    return wrong


@dataclass(frozen=True)
class Soaked:
    """What became of it: the process that was killed, the one that resumed, and what was wrong."""

    kept: int  # results that the killed one left
    killed: Ran
    resumed: Ran
    wrong: list[str]
    answers: int
    errors: int
    seconds: float


def soak(folder: Path, requests: int, longest: int, rows: int, most_new: int = 40) -> Soaked:
    started = time.perf_counter()
    make_model(folder / "model")
    lines = make_lines(requests, longest, most_new)
    config, prompts, out = folder / "config.yaml", folder / "in.jsonl", folder / "out.jsonl"
    config.write_text(CONFIG.format(folder=folder / "model"))
    prompts.write_text("".join(f"{line.text}\n" for line in lines))
    journal = out.with_name("out.jsonl.journal")
    common = ["run", str(config), "--prompts", str(prompts), "--batch-size", str(rows), "--output", str(out)]
    warm = 4 * rows
    killed = run(common, journal, warm + sum(bool(line.error) for line in lines), kill_at=requests // 2)
    kept = lines_of(journal) - 1
    resumed = run([*common, "--resume"], journal, warm)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    wrong = differences(lines, results, Session.load(config))
    seconds = time.perf_counter() - started
    answers = sum("text" in result for result in results)
    return Soaked(kept, killed, resumed, wrong, answers, len(results) - answers, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--longest", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), given.requests, given.longest, given.rows)
    print(f"{given.requests} requests of 1 to {given.longest} tokens in {found.seconds:.0f} s, their own runs included")
    print(
        f"killed after {found.kept} results (exit {found.killed.code}), resumed to the end (exit {found.resumed.code})"
    )
    print(f"{found.answers} answers, {found.errors} errors, {len(found.wrong)} other than they should be")
    for name, ran in (("killed", found.killed), ("resumed", found.resumed)):
        share = ran.end / ran.begin - 1
        print(
            f"{name}: {ran.begin / 1e6:.1f} MB resident at the begin, {ran.end / 1e6:.1f} MB at the end ({share:+.1%})"
        )
    print("\n".join(found.wrong[:10]))
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
