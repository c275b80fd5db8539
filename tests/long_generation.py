"""Tens of thousands of tokens from a tiny random model: what is held, and how long the longest step is.

    PYTHONPATH=.:plugins:kernels python tests/long_generation.py --tokens 50000

Nobody tells the cache how long it will be, so store and codes grow as they fill up. Runs twice: once under a meter of
every tensor, once against the clock. `integration/test_long_generation.py` has the short version.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tiny_models import language_model, prompt, tiny_model

from pariskv import parse_config
from pariskv.config import Config, GenerationConfig
from pariskv.decode import Batch, decode, prefill
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.transformers import ParisCache
from pariskv.meter import Meter

CONFIG = parse_config({"layers": {"default": {"top_k": 64}}})
PROMPT = 300
PLANNED = 256
"""New tokens that the cache is told of."""


@dataclass
class Held:
    """Bytes after some step; `rest` is what is alive beside store and codes."""

    step: int
    store: int
    codes: int
    rest: int


def a_model() -> LanguageModel:
    return language_model(tiny_model("llama", num_hidden_layers=2, max_position_embeddings=1 << 20).float())


def started(model: LanguageModel, tokens: int, config: Config) -> tuple[ParisCache, Iterator[object]]:
    """A cache that has read the prompt and knows of PLANNED tokens, and the steps that generate more."""
    cache, batch = model.new_cache(config), Batch(prompt(PROMPT))
    cache.warm_up()  # as a session does
    logits = prefill(model, cache, batch, PLANNED)
    return cache, decode(model, cache, batch, logits, GenerationConfig(max_new_tokens=tokens))


def measure_memory(model: LanguageModel, tokens: int, every: int, config: Config = CONFIG) -> list[Held]:
    """What is held after every so many steps, once the zone has begun."""
    held: list[Held] = []
    with Meter() as meter:
        cache, steps = started(model, tokens, config)
        for step, _ in enumerate(steps):
            if step and step % every == 0:
                store, codes = cache.request.kv_host_bytes, cache.request.code_bytes
                held.append(Held(step, store, codes, meter.live - store - codes))
    return held


def measure_time(model: LanguageModel, tokens: int, config: Config = CONFIG) -> dict[str, list[float]]:
    """Seconds of every step by the clock on the wall, and of this process's own on the CPU."""
    _, steps = started(model, tokens, config)
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    seconds: dict[str, list[float]] = {name: [] for name in clocks}
    last = {name: clock() for name, clock in clocks.items()}
    for _ in steps:
        for name, clock in clocks.items():
            now = clock()
            seconds[name].append(now - last[name])
            last[name] = now
    return {name: found[1:] for name, found in seconds.items()}


def report(held: list[Held], seconds: dict[str, list[float]]) -> str:
    lines = [f"{'step':>8} {'store MB':>9} {'codes MB':>9} {'rest MB':>8}"]
    lines += [f"{one.step:8} {one.store / 1e6:9.2f} {one.codes / 1e6:9.2f} {one.rest / 1e6:8.3f}" for one in held]
    for name, found in seconds.items():
        ordered = sorted(found)
        longest = sorted(range(len(found)), key=found.__getitem__)[-3:]
        lines.append(
            f"{name} ms a step: median {1e3 * statistics.median(found):.2f}, "
            f"99.9 % within {1e3 * ordered[-len(ordered) // 1000]:.2f}, "
            f"the longest {1e3 * ordered[-1]:.2f} (three longest: steps {[index + 1 for index in longest]})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=5_000)
    given = parser.parse_args()
    model = a_model()
    seconds = measure_time(model, given.tokens)
    print(report(measure_memory(model, given.tokens, given.every), seconds), flush=True)


if __name__ == "__main__":
    main()
