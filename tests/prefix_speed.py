"""How fast a prefix is saved and loaded, beside a plain read of the same file.

    PYTHONPATH=.:plugins:kernels python tests/prefix_speed.py --shape llama3.2-1b --tokens 32K --folder /tmp

A random model reads random tokens. Between two reads the file is put out of the page cache, where that is possible.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pariskv.bench.synthetic import bench_config
from pariskv.decode import Batch, prefill
from pariskv.integrations.shapes import SHAPES, random_model
from pariskv.prefix import Prefix, load_prefix, save_prefix
from pariskv.units import parse_tokens

PIECE = 16 << 20
NEW_TOKENS = 64


def read_plainly(path: Path) -> None:
    piece = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def evict(path: Path) -> None:
    """Out of the page cache; what is read next comes from the disk, as far as this machine knows."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3.2-1b")
    parser.add_argument("--tokens", default="32K", type=parse_tokens)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    store = "uva" if on_gpu else "resident"
    model = random_model(SHAPES[given.shape], given.shape, device, torch.bfloat16)
    config = bench_config(store, 100, "auto")
    with TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "prefix.safetensors"

        def save() -> float:
            tokens = torch.randint(0, SHAPES[given.shape]["vocab_size"], (1, given.tokens), device=device)
            cache, batch = model.new_cache(config), Batch(tokens)
            logits = prefill(model, cache, batch, NEW_TOKENS, chunk=8192)
            prefix = Prefix(cache, batch, logits)
            start = time.perf_counter()
            save_prefix(path, prefix, model)
            return time.perf_counter() - start

        def seconds(what: Callable[[], object]) -> float:
            start = time.perf_counter()
            kept = what()
            if on_gpu:
                torch.cuda.synchronize()
            found = time.perf_counter() - start
            del kept
            return found

        saving = save()
        gigabytes = path.stat().st_size / 1e9
        print(f"{given.shape}, {given.tokens} tokens, store {store}: {gigabytes:.2f} GB, {os.cpu_count()} cores")
        print(f"saved at {gigabytes / saving:.2f} GB/s")
        for kind in ("from the disk", "from the page cache"):
            for _ in range(given.times):
                found = []
                for what in (lambda: read_plainly(path), lambda: load_prefix(path, model, config)):
                    if kind == "from the disk":
                        evict(path)
                    found.append(gigabytes / seconds(what))
                print(f"{kind}: a plain read {found[0]:.2f} GB/s, loaded at {found[1]:.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
