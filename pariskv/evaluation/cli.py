"""The commands under `pariskv eval`: a configuration and options in, a table or JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pariskv import texts
from pariskv.config import DEFAULT, Config, load_config
from pariskv.errors import ConfigError

if TYPE_CHECKING:
    from pariskv.evaluation.fidelity import Measured

eval_app = typer.Typer(help="Measure how much of dense attention a configuration finds.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="values that replace the file's")
]


@eval_app.callback()
def evaluate() -> None:
    """Measure how much of dense attention a configuration finds."""


@eval_app.command()
def fidelity(
    context: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    text_file: Annotated[
        list[Path] | None,
        typer.Option(help="a text, may be repeated; without one, two of prose and two of source code"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of a text that are the prompt")] = 4000,
    steps: Annotated[int, typer.Option(min=1, help="tokens after it that are decoded, teacher-forced")] = 32,
    top_k: Annotated[int | None, typer.Option(min=1, help="rows fetched per key/value head and step")] = None,
    candidates: Annotated[str | None, typer.Option(help="auto, a ratio such as 0.1, or a count of tokens")] = None,
    preset: Annotated[str | None, typer.Option(help="one retriever in every layer, such as pariskv-paper")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Along real texts, against dense attention: recall, mass, output error by layer, and the next token."""
    from pariskv.bench.manifest import make_manifest
    from pariskv.cli import described_progress, wide_console
    from pariskv.compare import check_names, config_for
    from pariskv.evaluation.fidelity import measure_fidelity
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.registry import Registry

    given = [f"layers.default.{key}={value}" for key, value in (("top_k", top_k), ("candidates", candidates)) if value]
    settings = load_config(config, [*(overrides or []), *given])
    if preset is not None:
        check_names(settings, [preset], Registry.load())
        settings = config_for(settings, preset, settings.layers[DEFAULT].top_k or 1)
    samples = {str(file): texts.read_text(file) for file in text_file or []}
    samples = samples or {name: text() for name, text in texts.STANDARD.items()}
    model = LanguageModel.load(settings)
    with described_progress() as progress:
        found = measure_fidelity(model, settings, samples, tokens, steps, progress=progress)
    if as_json:
        manifest = make_manifest("eval fidelity", _plain(context.params), settings)
        manifest["measured"] = {"texts": found.texts, "sha256": {name: texts.sha256(s) for name, s in samples.items()}}
        print(json.dumps({"manifest": manifest, "layers": found.layers(), "summary": found.summary()}))
    else:
        _show(found, wide_console())


@eval_app.command()
def drift(
    context: typer.Context,
    config: ConfigPath,
    retrievers: Annotated[str, typer.Option(help="retrievers, or the CONFIG's instances of them, with commas")],
    overrides: Overrides = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="made-up keys that turn by 90 degrees")] = False,
    steps: Annotated[
        int | None, typer.Option(min=10, help="tokens that are decoded; 100,000 with --synthetic, else 3,500")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of the prompt; 8,192 or 4,000")] = None,
    positions: Annotated[int, typer.Option(min=2, help="at how many positions recall is looked at")] = 20,
    plot: Annotated[Path | None, typer.Option(help="draw recall against the position")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Recall@100 while generation moves away from the prompt: of a model from prose to code, or of made-up keys."""
    from pariskv.bench.manifest import make_manifest
    from pariskv.cli import described_progress, wide_console
    from pariskv.compare import check_names
    from pariskv.compare_output import check_plot
    from pariskv.evaluation.drift import Synthetic, draw, measure_drift, summarise, to_json
    from pariskv.registry import Registry
    from pariskv.units import parse_list

    settings, registry = load_config(config, overrides or []), Registry.load()
    names = parse_list(retrievers, str, "--retrievers")
    check_names(settings, names, registry)
    if plot is not None:
        check_plot(plot)
    with described_progress() as progress:
        if synthetic:
            made = Synthetic(steps=steps or 100_000, prompt=tokens or 8192, positions=positions)
            traces, moments = {0: (made.info(), made.trace())}, None
        else:
            traces, moments = _model_traces(settings, tokens or 4000, steps or 3500)
        found = measure_drift(settings, names, traces, positions, QUERIES, registry, moments, progress)
        points = list(found)
    if as_json:
        manifest = make_manifest("eval drift", _plain(context.params), settings)
        print(json.dumps({"manifest": manifest, **to_json(points)}))
    else:
        table = Table("retriever", "start", "end", "end / start", "slope per 1,000 tokens", title="recall@100")
        for one in summarise(points):
            numbers = (f"{one.start:.3f}", f"{one.end:.3f}", f"{one.ratio:.3f}", f"{one.slope:+.5f}")
            table.add_row(one.retriever, *numbers)
        wide_console().print(table)
    if plot is not None:
        draw(points, plot)


@eval_app.command()
def needle(
    context: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    retrievers: Annotated[str, typer.Option(help="retrievers beside dense attention, with commas")] = "pariskv",
    lengths: Annotated[str, typer.Option(help="tokens of the prompts, with commas")] = "1000,2000,4000",
    depths: Annotated[str, typer.Option(help="where the needle lies, 0 to 1, with commas")] = "0,0.25,0.5,0.75,1",
    tries: Annotated[int, typer.Option(min=1, help="needles at each length and depth")] = 1,
    plot: Annotated[Path | None, typer.Option(help="draw a heat map for each retriever")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """The needle grid: is a number found in a haystack, by length and depth, beside dense attention?"""
    from pariskv.bench.manifest import make_manifest
    from pariskv.cli import described_progress, wide_console
    from pariskv.compare import check_names
    from pariskv.compare_output import check_plot
    from pariskv.evaluation.needle import draw, measure_needles
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.registry import Registry
    from pariskv.units import parse_list, parse_tokens

    settings, registry = load_config(config, overrides or []), Registry.load()
    names = parse_list(retrievers, str, "--retrievers")
    sizes, places = parse_list(lengths, parse_tokens, "--lengths"), parse_list(depths, _depth, "--depths")
    check_names(settings, names, registry)
    if plot is not None:
        check_plot(plot)
    model = LanguageModel.load(settings)
    with described_progress() as progress:
        cells = list(measure_needles(model, settings, names, sizes, places, tries, registry, progress))
    if as_json:
        manifest = make_manifest("eval needle", _plain(context.params), settings)
        print(json.dumps({"manifest": manifest, "rows": [cell.to_dict() for cell in cells]}))
    else:
        for name in dict.fromkeys(cell.retriever for cell in cells):
            table = Table("depth", *(f"{size:,}" for size in sizes), title=name, title_justify="left")
            for place in places:
                row = [cell for cell in cells if (cell.retriever, cell.depth) == (name, place)]
                table.add_row(f"{place:g}", *(f"{cell.found} of {cell.tries}" for cell in row))
            wide_console().print(table)
    if plot is not None:
        draw(cells, plot)


def _depth(text: str) -> float:
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 1:
        raise ConfigError(f"got {text!r}, wanted a number from 0 (the beginning) to 1 (the end)")
    return depth


QUERIES = 16
"""Queries that are asked at each position."""


def _model_traces(settings: Config, tokens: int, steps: int) -> tuple[Any, Any]:
    """The model's layers along prose, then source code, and the moments of its calibration."""
    from pariskv.evaluation.drift import model_traces
    from pariskv.evaluation.fidelity import refuse_length
    from pariskv.integrations.calibration import find_calibration
    from pariskv.integrations.language_model import LanguageModel

    model = LanguageModel.load(settings)
    refuse_length(model, settings, tokens, steps)
    kept = find_calibration(model.model)
    prose, code = texts.STANDARD["prose-1"](), texts.STANDARD["source-1"]()
    return model_traces(model, prose, code, tokens, steps), None if kept is None else kept.moments


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in arguments.items()}
    if "text_file" in arguments:
        plain["text_file"] = [str(path) for path in arguments["text_file"] or []]
    return plain


HEADS = ("candidate_recall", "recall", "mass_ratio", "output_error")


def _show(found: Measured, console: Console) -> None:
    table = Table("layer", *(name.replace("_", " ") for name in HEADS), title="by layer", title_justify="left")
    for row in found.layers():
        table.add_row(str(row["layer"]), *(_number(row[name]) for name in HEADS))
    console.print(table)
    summary = found.summary()
    table = Table("text", *(name.replace("_", " ") for name in summary), title="by text", title_justify="left")
    for name, means in found.texts.items():
        table.add_row(name, *(_number(value) for value in means.values()))
    table.add_section()
    table.add_row("all", *(_number(value) for value in summary.values()))
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def calibrate(config: Config, text_files: list[Path], tokens: int | None) -> None:
    """The work of `pariskv calibrate`: measure the model's queries, keep them, say where."""
    from pariskv.cli import described_progress
    from pariskv.integrations.calibrate import TOKENS, calibrate
    from pariskv.integrations.calibration import file_of, save_calibration
    from pariskv.integrations.language_model import LanguageModel

    samples = [texts.read_text(file) for file in text_files] or [text() for text in texts.CALIBRATION.values()]
    model = LanguageModel.load(config)
    with described_progress() as progress:
        found = calibrate(model, samples, tokens or TOKENS, lambda done, total: progress("calibrating", done, total))
    path = file_of(model.model)
    save_calibration(found, path)
    print(f"{config.model.name}: queries of {found.about['tokens']:,} tokens in {len(found.moments)} layers, {path}")
