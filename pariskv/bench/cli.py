"""The commands under `pariskv bench`: options in, a table and `--json FILE` out.

Each checks its options, then that there is a CUDA device (which `batching` does without); rows are written to the file
as they come, so that an interrupted run keeps what it measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pariskv.errors import ConfigError
from pariskv.progress import described_progress

if TYPE_CHECKING:
    from pariskv.bench.output import Row
    from pariskv.config import Config

bench_app = typer.Typer(
    help="Measure kernels, layers, decode steps, retrievers, the allocator and batches on this machine's GPU."
)

LENGTHS = "32K,128K,512K,1M"
STORES = "resident,uva,uva reuse"
RETRIEVERS = "pariskv,quest,pqcache,retroinfer,shadowkv,magicpig,snapkv,window"

Lengths = Annotated[str, typer.Option("--tokens", help="lengths of the history, with commas; K is 1024")]
Batches = Annotated[str, typer.Option("--batch", help="rows of a batch, with commas")]
TopKs = Annotated[str, typer.Option("--top-k", help="rows that are fetched per key/value head, with commas")]
Stores = Annotated[
    str, typer.Option("--store", help=f"where keys and values are kept, with commas: {STORES.replace(',', ', ')}")
]
Candidates = Annotated[
    str, typer.Option(help="auto (10 % of a long history), a ratio such as 0.025, or a count: tokens that are reranked")
]
Overlap = Annotated[float, typer.Option(help="share of the rows that consecutive steps both choose")]
Replays = Annotated[int, typer.Option(min=1, help="graph replays of which the median is taken")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="of the configuration, such as layers.default.retriever=pariskv-paper, retrievers.pariskv.rest=none",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="write {manifest, rows} to this file")]


@bench_app.command()
def kernels(
    context: typer.Context,
    tokens: Lengths = LENGTHS,
    top_k: TopKs = "100,2048",
    store: Stores = STORES,
    candidates: Candidates = "auto",
    overlap: Overlap = 0.7,
    batch: Annotated[int, typer.Option(min=1, help="rows of the batch")] = 1,
    replays: Replays = 20,
    json: Json = None,
) -> None:
    """Each kernel on its own: microseconds in a graph, bytes moved, share of the measured bandwidth."""
    from pariskv.bench.kernels import Settings, measure
    from pariskv.bench.timing import GraphTimer
    from pariskv.units import parse_candidates, parse_count, parse_list, parse_tokens

    settings = Settings(
        tokens=parse_list(tokens, parse_tokens, "--tokens"),
        top_ks=parse_list(top_k, parse_count, "--top-k"),
        stores=_stores(store),
        candidates=parse_candidates(candidates),
        batch=batch,
        overlap=_share(overlap),
    )
    timer, run = GraphTimer(replays), _Run(context, json, settings.num_rows)
    run.show(measure(settings, timer, run.measured))


@bench_app.command()
def layer(
    context: typer.Context,
    overrides: Overrides = None,
    tokens: Lengths = LENGTHS,
    batch: Batches = "1,8",
    top_k: TopKs = "100,2048",
    store: Stores = STORES,
    candidates: Candidates = "auto",
    overlap: Overlap = 0.7,
    replays: Replays = 20,
    json: Json = None,
) -> None:
    """One layer's retrieval, fetch and attention, beside dense SDPA at the same length."""
    from pariskv.bench.layer import Settings, measure
    from pariskv.bench.synthetic import bench_config
    from pariskv.bench.timing import GraphTimer
    from pariskv.resolve import for_device
    from pariskv.units import parse_candidates, parse_count, parse_list, parse_tokens

    settings = Settings(
        tokens=parse_list(tokens, parse_tokens, "--tokens"),
        batches=parse_list(batch, parse_count, "--batch"),
        top_ks=parse_list(top_k, parse_count, "--top-k"),
        stores=_stores(store),
        candidates=parse_candidates(candidates),
        overlap=_share(overlap),
        overrides=tuple(overrides or ()),
    )
    config = bench_config(settings.stores[0], settings.top_ks[0], settings.candidates, settings.overrides)
    timer = GraphTimer(replays)
    run = _Run(context, json, settings.num_rows, for_device(config, timer.device))
    run.show(measure(settings, timer, run.measured))


@bench_app.command()
def decode(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help="whose sizes the random model has: llama3-8b, llama3.2-1b or qwen3-8b")],
    overrides: Overrides = None,
    tokens: Lengths = "128K",
    batch: Batches = "1",
    store: Stores = "uva",
    top_k: Annotated[int, typer.Option(min=1, help="rows that are fetched per key/value head")] = 100,
    candidates: Candidates = "auto",
    steps: Annotated[int, typer.Option(min=1, help="decode steps of which the mean is taken")] = 256,
    prefill: Annotated[bool, typer.Option("--prefill", help="read a real random prompt, and time it")] = False,
    chunk: Annotated[int | None, typer.Option(min=1, help="tokens of that prompt at a time; all without")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="device memory that torch may use, such as 80GB")] = None,
    graph: Annotated[bool, typer.Option(help="capture a step in a CUDA graph and replay it")] = True,
    compile: Annotated[bool, typer.Option(help="torch.compile the model's forward first")] = True,
    json: Json = None,
) -> None:
    """Whole decode steps of a random model over a synthetic history, pariskv beside a dense static cache."""
    from pariskv.bench.decode import Settings, measure
    from pariskv.bench.synthetic import bench_config
    from pariskv.bench.timing import GraphTimer
    from pariskv.integrations.shapes import SHAPES
    from pariskv.resolve import for_device
    from pariskv.units import one_of, parse_bytes, parse_candidates, parse_count, parse_list, parse_tokens

    (name,) = parse_list(shape, one_of(tuple(SHAPES)), "--shape")
    settings = Settings(
        shape=name,
        sizes=SHAPES[name],
        tokens=parse_list(tokens, parse_tokens, "--tokens"),
        batches=parse_list(batch, parse_count, "--batch"),
        stores=_stores(store),
        top_k=top_k,
        candidates=parse_candidates(candidates),
        graph=graph,
        compile=compile,
        steps=steps,
        overrides=tuple(overrides or ()),
        prefill=prefill,
        chunk=chunk,
        memory_cap=None if memory_cap is None else parse_list(memory_cap, parse_bytes, "--memory-cap")[0],
    )
    config = bench_config(settings.stores[0], top_k, settings.candidates, settings.overrides, **settings.runtime)
    timer = GraphTimer()
    run = _Run(context, json, settings.num_rows, for_device(config, timer.device))
    run.show(measure(settings, timer, run.measured))


@bench_app.command()
def retrievers(
    context: typer.Context,
    retrievers: Annotated[str, typer.Option(help="what to measure, with commas")] = RETRIEVERS,
    tokens: Lengths = "1M",
    batch: Batches = "1",
    top_k: Annotated[int, typer.Option(min=1, help="rows that are fetched per key/value head")] = 100,
    candidates: Candidates = "auto",
    steps: Annotated[int, typer.Option(min=1, help="eager steps of which the median is taken")] = 20,
    json: Json = None,
) -> None:
    """One layer's decode step by every retriever with its published placement, beside dense SDPA."""
    from pariskv.bench.retrievers import Settings, measure
    from pariskv.bench.timing import GraphTimer
    from pariskv.registry import Registry
    from pariskv.resolve import for_device
    from pariskv.units import one_of, parse_candidates, parse_count, parse_list, parse_tokens

    settings = Settings(
        retrievers=parse_list(retrievers, one_of(tuple(Registry.load().names())), "--retrievers"),
        tokens=parse_list(tokens, parse_tokens, "--tokens"),
        batches=parse_list(batch, parse_count, "--batch"),
        top_k=top_k,
        candidates=parse_candidates(candidates),
        steps=steps,
    )
    timer, config = GraphTimer(), settings.config(settings.retrievers[0], settings.tokens[0])
    run = _Run(context, json, settings.num_rows, for_device(config, timer.device))
    run.show(measure(settings, timer, run.measured))


@bench_app.command()
def batching(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help="whose sizes the random model has: llama3.2-1b, smollm2-135m, ...")],
    overrides: Overrides = None,
    batch: Batches = "16",
    requests: Annotated[int, typer.Option(min=1, help="prompts")] = 16,
    shortest: Annotated[int, typer.Option(min=1, help="tokens of the shortest prompt")] = 1000,
    longest: Annotated[int, typer.Option(min=1, help="tokens of the longest prompt")] = 4000,
    new_tokens: Annotated[int, typer.Option(help="tokens that every prompt gets")] = 256,
    store: Annotated[str | None, typer.Option(help="as for decode; uva on a GPU, else resident")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="rows that are fetched per key/value head")] = 100,
    candidates: Candidates = "auto",
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cuda or cpu")] = "auto",
    graph: Annotated[bool | None, typer.Option(help="capture a step in a CUDA graph; on a GPU yes")] = None,
    json: Json = None,
) -> None:
    """Prompts of different lengths in one batch, beside one after the other; on a CPU in float32."""
    from pariskv.bench.batching import Settings, bench_device, measure
    from pariskv.bench.synthetic import bench_config
    from pariskv.integrations.shapes import SHAPES
    from pariskv.resolve import for_device
    from pariskv.units import one_of, parse_candidates, parse_count, parse_list

    (name,) = parse_list(shape, one_of(tuple(SHAPES)), "--shape")
    where = bench_device(device)
    on_gpu = where.type == "cuda"
    settings = Settings(
        shape=name,
        sizes=SHAPES[name],
        requests=requests,
        shortest=shortest,
        longest=longest,
        batches=parse_list(batch, parse_count, "--batch"),
        stores=_stores(store or ("uva" if on_gpu else "resident")),
        new_tokens=new_tokens,
        top_k=top_k,
        candidates=parse_candidates(candidates),
        graph=on_gpu if graph is None else graph,
        overrides=tuple(overrides or ()),
    )
    config = bench_config(settings.stores[0], top_k, settings.candidates, settings.overrides, **settings.runtime)
    run = _Run(context, json, settings.num_rows, for_device(config, where))
    run.show(measure(settings, where))


@bench_app.command()
def memory(
    context: typer.Context,
    size: Annotated[str, typer.Option("--bytes", help="sizes to allocate, with commas, such as 16GB")] = "1GB,4GB,16GB",
    json: Json = None,
) -> None:
    """The allocator of host memory that the GPU reads, beside cuMemHostAlloc."""
    import torch

    from pariskv.bench.memory import Settings, measure
    from pariskv.bench.timing import require_cuda
    from pariskv.units import parse_bytes, parse_list

    settings = Settings(sizes=parse_list(size, parse_bytes, "--bytes"))
    require_cuda()
    run = _Run(context, json, settings.num_rows)
    run.show(measure(settings, torch.device("cuda", torch.cuda.current_device())))


Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="what --json FILE wrote")]


@bench_app.command()
def plot(files: Files, out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path(".")) -> None:
    """Draw latency against length and throughput against batch into SVG files (needs pariskv[plots])."""
    from pariskv.bench.plots import plot

    for path in plot(files, out):
        print(path)


@bench_app.command()
def markdown(files: Files) -> None:
    """Print results as Markdown tables."""
    from pariskv.bench.output import as_markdown, read_json

    print("\n".join(as_markdown(read_json(file)) for file in files), end="")


class _Run:
    """One command's result: made before anything is measured, shown and written as rows come.

    measured  what the run finds out besides its rows; part of the manifest
    Raises ConfigError where the file cannot be written.
    """

    def __init__(self, context: typer.Context, json: Path | None, total: int, config: Config | None = None):
        from pariskv.bench.manifest import make_manifest
        from pariskv.bench.output import Result

        arguments = {name: value for name, value in context.params.items() if name != "json"}
        self.result = Result(make_manifest(str(context.info_name), arguments, config))
        self.measured = self.result.manifest["measured"]
        self.json, self.total = json, total
        self._write()

    def show(self, rows: Iterator[Row]) -> None:
        from pariskv.bench.output import as_table, notes

        with described_progress() as show:
            for done, row in enumerate(rows, start=1):
                self.result.rows.append(row)
                self._write()
                show(f"bench {self.result.kind}", done, self.total)
        console = Console()
        console = console if console.is_terminal else Console(width=200)
        console.print(as_table(self.result))
        for note in notes(self.result):
            console.print(note, markup=False)

    def _write(self) -> None:
        from pariskv.bench.output import write_json

        if self.json is not None:
            write_json(self.json, self.result)


def _stores(text: str) -> tuple[str, ...]:
    from pariskv.bench.synthetic import STORES
    from pariskv.units import one_of, parse_list

    return parse_list(text, one_of(tuple(STORES)), "--store")


def _share(value: float) -> float:
    if not 0 < value < 1:
        raise ConfigError(f"--overlap: got {value}, wanted a share between 0 and 1")
    return value
