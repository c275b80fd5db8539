"""`pariskv eval tasks` and `pariskv eval merge`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from pariskv.config import DEFAULT, Config, load_config
from pariskv.errors import ConfigError
from pariskv.evaluation.cli import AsJson, ConfigPath, Overrides, Report, check_files, eval_app

if TYPE_CHECKING:
    from pariskv.evaluation.tasks.evaluation import Settings
    from pariskv.evaluation.tasks.folder import RunFolder, Shard

__all__ = ["eval_app"]

AUTO = "auto"
"""The address of the cluster that Ray finds by itself."""

RUNS = Path("runs")
"""Where the folders of runs are, unless `--out` says otherwise."""


class OptionalAddress(TyperCommand):
    """A command whose `--ray` needs no value; Typer has no such options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Click parses them, `--ray` alone as `--ray auto`."""
        found: list[str] = super().parse_args(ctx, with_address(args))
        return found


def with_address(arguments: Sequence[str]) -> list[str]:
    """The arguments, with an address after a `--ray` that has none: at the end, before an option or a key=value."""
    found = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        found.append(argument)
        if argument == "--ray" and (following.startswith("-") or "=" in following):
            found.append(AUTO)
    return found


@eval_app.command(cls=OptionalAddress)
def tasks(
    context: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="ruler, one of its tasks, longbench2, longbench2_cot, gpqa_diamond, math500, aime25; with commas"
        ),
    ] = None,
    retrievers: Annotated[str | None, typer.Option(help="who answers, with commas; config: the file as it is")] = None,
    lengths: Annotated[str | None, typer.Option(help="RULER: tokens of prompt and answer, with commas")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="items of each task at most")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="answers to each item")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of an answer at most")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="answers that are decoded together")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with published data")] = None,
    haystack: Annotated[str, typer.Option(help="RULER: auto, own or published texts")] = "auto",
    question: Annotated[
        str, typer.Option(help="dense: the question is read with the context; sparse: it is decoded")
    ] = "dense",
    shards: Annotated[str, typer.Option(help="I/N: the I-th of N parts of the run")] = "1/1",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="run on a Ray cluster: the one that Ray finds (--ray alone, or auto), one by its address, or local: "
            "one that is started here",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="with --ray: models; one for each GPU without")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run; runs/CONFIG without")] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Published benchmarks, dense attention beside retrievers on the same items; goes on where it was interrupted."""
    from pariskv.evaluation.tasks.evaluation import Settings, check_retrievers
    from pariskv.evaluation.tasks.folder import Shard
    from pariskv.evaluation.tasks.ruler.published import HAYSTACKS
    from pariskv.registry import Registry
    from pariskv.units import one_of, parse_list, parse_tokens, with_option

    loaded = load_config(config, overrides or [])
    asked = loaded.evaluation
    default = ("dense", str(loaded.layers[DEFAULT].retriever))
    settings = Settings(
        tasks=parse_list(tasks, str, "--tasks") if tasks else tuple(asked.tasks),
        retrievers=parse_list(retrievers, str, "--retrievers")
        if retrievers
        else tuple(asked.retrievers or dict.fromkeys(default)),
        lengths=parse_list(lengths, parse_tokens, "--lengths") if lengths else tuple(asked.lengths),
        limit=limit or asked.limit,
        samples=samples or asked.samples,
        max_new_tokens=max_new_tokens or asked.max_new_tokens,
        batch=batch or asked.batch,
        question=question,
        haystack=with_option("--haystack", one_of(HAYSTACKS), haystack),  # type: ignore[arg-type]
        data=data,
    )
    check_retrievers(loaded, settings.retrievers, Registry.load())
    refuse_same_answers(loaded, settings)
    shard = Shard.parse(shards)
    check_files(None, report)
    if data is not None and not data.is_dir():
        raise ConfigError(f"--data {data}: there is no such folder")
    if workers is not None and ray is None:
        raise ConfigError("--workers: is for --ray; without a cluster there is one model")
    where = out or RUNS / (config.stem if shard.count == 1 else f"{config.stem}-{shard.index}-of-{shard.count}")
    manifest = _manifest(context.params, loaded, shard)
    if ray is None:
        folder = _run_here(loaded, settings, shard, where, manifest)
    else:
        folder = _run_on_cluster(loaded, settings, shard, where, manifest, ray, workers)
    finish(folder, as_json, report)


@eval_app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER ...", help="folders of all shards of one run")],
    out: Annotated[Path, typer.Option(help="folder of the joined run")],
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Join the shards of a run: the folder, scores and report of the whole."""
    from pariskv.evaluation.tasks.merge import merge

    check_files(None, report)
    finish(merge(folders, out), as_json, report)


def refuse_same_answers(config: Config, settings: Settings) -> None:
    """Raise ConfigError where every answer to an item would be the same: several samples, nothing sampled."""
    from pariskv.evaluation.tasks.catalogue import samples_of

    for task in settings.tasks:
        samples = settings.samples or samples_of(task)
        if samples > 1 and config.generation.temperature == 0:
            raise ConfigError(
                f"{task}: {samples} answers to each item, but generation.temperature=0 gives the same answer each "
                f"time; set it, such as generation.temperature=0.6, or give --samples 1"
            )


def finish(folder: RunFolder, as_json: bool, report: Path | None) -> None:
    """Write the run's scores and page into its folder, and show them."""
    from pariskv.cli import wide_console
    from pariskv.evaluation.page import write_page
    from pariskv.evaluation.tasks.folder import REPORT, SCORES, write_json
    from pariskv.evaluation.tasks.report import results_of

    if not folder.records:
        raise ConfigError(f"{folder.path}: this shard has no items; take fewer shards")
    results = results_of(folder)
    write_json(folder.path / SCORES, {"manifest": results.manifest, **results.found})
    write_page(results, folder.path / REPORT)
    results.give(wide_console(200), as_json, None, report)
    if not as_json:
        print(f"{results.headline}\nprompts, answers, scores and report: {folder.path}")


def _manifest(arguments: dict[str, Any], config: Config, shard: Shard) -> dict[str, Any]:
    from pariskv.evaluation.results import manifest_of

    return {**manifest_of("eval tasks", arguments, config, None), "shard": str(shard)}


def _run_here(config: Config, settings: Settings, shard: Shard, where: Path, manifest: dict[str, Any]) -> RunFolder:
    from pariskv.evaluation.cli import calibration_of
    from pariskv.evaluation.tasks.evaluation import Evaluation
    from pariskv.evaluation.tasks.folder import RunFolder, description
    from pariskv.evaluation.tasks.launch import run_here
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.progress import described_progress

    evaluation = Evaluation(LanguageModel.load(config), config, settings)
    used = calibration_of(evaluation.model, evaluation.configs.values())
    folder = RunFolder.open(where, {**manifest, "calibration": used, "run": description(evaluation)})
    with described_progress() as progress:
        run_here(evaluation, folder, shard, progress)
    return folder


def _run_on_cluster(
    config: Config,
    settings: Settings,
    shard: Shard,
    where: Path,
    manifest: dict[str, Any],
    address: str,
    workers: int | None,
) -> RunFolder:
    from pariskv.evaluation.tasks.cluster import Cluster, connected
    from pariskv.evaluation.tasks.folder import RunFolder
    from pariskv.progress import described_progress

    data = None if settings.data is None else settings.data.absolute()
    with connected(address) as ray:
        cluster = Cluster(ray, config, replace(settings, data=data), workers)
        run, jobs = cluster.describe()
        folder = RunFolder.open(where, {**manifest, "run": run})
        with described_progress() as progress:
            cluster.run(jobs, folder, shard, progress, _table_printer(folder))
    return folder


def _table_printer(folder: RunFolder) -> Callable[[], None]:
    """Prints the scores so far on standard error."""
    from pariskv.evaluation.tasks.report import results_of

    console = Console(stderr=True, width=160)
    return lambda: console.print(results_of(folder).tables[0].as_rich())
