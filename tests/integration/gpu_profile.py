"""Where a captured decode step's time goes, kernel by kernel. By hand, on a GPU:

    python tests/integration/gpu_profile.py [TOKENS] [BATCH] [SHAPE]

Prints the median and the slowest of some hundred steps, then what torch's profiler sees in four of them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pariskv.bench.decode import Step, fill_cache, paris_step
from pariskv.bench.synthetic import bench_config
from pariskv.integrations.shapes import SHAPES, random_model
from pariskv.units import parse_tokens

STEPS, PROFILED, WARM_UP = 300, 4, 6
TOP_K = 100
NAME = 95


def main(tokens: int, batch: int, shape: str) -> None:
    model = random_model(SHAPES[shape], shape, torch.device("cuda"), torch.bfloat16)
    config = bench_config("uva", TOP_K, "auto", graph="on", compile=True)
    new_tokens = STEPS + PROFILED + WARM_UP + 1
    cache = model.new_cache(config)
    fill_cache(cache, batch, tokens, new_tokens)
    show(paris_step(model, cache, batch, tokens, new_tokens, config.runtime))


def show(step: Step) -> None:
    for _ in range(WARM_UP):
        step()
    times = sorted(1e3 * seconds_of(step) for _ in range(STEPS))
    print(f"{STEPS} steps: median {median(times):.3f} ms, slowest {[round(ms, 2) for ms in times[-3:]]}")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events: Any = profiler.events()
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    total, count = Counter[str](), Counter[str]()
    for event in on_device:
        total[event.name[:NAME]] += event.time_range.elapsed_us()
        count[event.name[:NAME]] += 1
    print(f"busy {sum(total.values()) / PROFILED / 1e3:.3f} ms a step in {len(on_device) / PROFILED:.0f} kernels")
    for name, us in total.most_common():
        print(f"{us / PROFILED:9.1f} us a step {count[name] / PROFILED:7.1f} x {us / count[name]:8.2f} us  {name}")


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *["128K", "1", "llama3-8b"][len(sys.argv) - 1 :]]
    main(parse_tokens(arguments[0]), int(arguments[1]), arguments[2])
