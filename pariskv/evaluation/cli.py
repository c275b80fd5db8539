"""The commands under `pariskv eval`: a configuration and options in, a table or JSON out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pariskv import texts
from pariskv.config import DEFAULT, Config, load_config
from pariskv.errors import ConfigError

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel

eval_app = typer.Typer(help="Measure how much of dense attention a configuration finds.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="values that replace the file's")
]


AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")]
Report = Annotated[Path | None, typer.Option(help="write a page to look at, one HTML file that needs nothing else")]


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
    plot: Annotated[Path | None, typer.Option(help="draw recall and mass by layer, and KL by step")] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Along real texts, against dense attention: recall, mass, output error by layer, and the next token."""
    from pariskv.cli import wide_console
    from pariskv.compare import check_names, config_for
    from pariskv.evaluation.fidelity import measure_fidelity, results_of
    from pariskv.evaluation.results import manifest_of
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.progress import described_progress
    from pariskv.registry import Registry

    given = [f"layers.default.{key}={value}" for key, value in (("top_k", top_k), ("candidates", candidates)) if value]
    settings = load_config(config, [*(overrides or []), *given])
    if preset is not None:
        check_names(settings, [preset], Registry.load())
        settings = config_for(settings, preset, settings.layers[DEFAULT].top_k or 1)
    samples = {str(file): texts.read_text(file) for file in text_file or []}
    samples = samples or {name: text() for name, text in texts.STANDARD.items()}
    check_files(plot, report)
    model = LanguageModel.load(settings)
    with described_progress() as progress:
        found = measure_fidelity(model, settings, samples, tokens, steps, progress=progress)
    digests = {name: texts.sha256(text) for name, text in samples.items()}
    measured = {"texts": found.texts, "sha256": digests, "kl_by_step": found.kl_by_step()}
    used = calibration_of(model, [settings])
    manifest = manifest_of("eval fidelity", context.params, settings, used, **measured)
    title = f"Fidelity of {settings.layers[DEFAULT].retriever} on {settings.model.name}"
    results_of(found, manifest, title).give(wide_console(), as_json, plot, report)


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
    layers: Annotated[str | None, typer.Option(help="layers of the model that are followed, with commas")] = None,
    positions: Annotated[int, typer.Option(min=2, help="at how many positions recall is looked at")] = 20,
    degrees: Annotated[float, typer.Option(min=0, max=180, help="by which the made-up keys turn")] = 90,
    tries: Annotated[int, typer.Option(min=1, help="with --synthetic: keys of other random numbers each time")] = 1,
    plot: Annotated[Path | None, typer.Option(help="draw recall against the position")] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Recall@100 while generation moves away from the prompt: of a model from prose to code, or of made-up keys."""
    from pariskv.cli import wide_console
    from pariskv.compare import check_names
    from pariskv.evaluation.drift import Synthetic, measure_drift, ratios_of, results_of
    from pariskv.evaluation.results import manifest_of
    from pariskv.progress import described_progress
    from pariskv.registry import Registry
    from pariskv.units import parse_list

    settings, registry = load_config(config, overrides or []), Registry.load()
    names = parse_list(retrievers, str, "--retrievers")
    check_names(settings, names, registry)
    check_files(plot, report)
    if synthetic and layers is not None:
        raise ConfigError(f"--layers: got {layers!r}, but --synthetic has no model; leave out one of the two")
    if not synthetic and (tries > 1 or degrees != 90):
        raise ConfigError("--tries and --degrees are of made-up keys; add --synthetic, or leave them out")
    moments, used, found = None, None, []
    with described_progress() as progress:
        for seed in range(tries):
            if synthetic:
                made = Synthetic(steps or 100_000, tokens or 8192, positions=positions, degrees=degrees, seed=seed)
                traces: Any = {0: (made.info(), made.trace())}
            else:
                traces, moments, used = _model_traces(settings, names, tokens or 4000, steps or 3500, layers)
            found.append(list(measure_drift(settings, names, traces, positions, QUERIES, registry, moments, progress)))
    manifest = manifest_of("eval drift", context.params, settings, used, ratios=ratios_of(found))
    turned = f"made-up keys that turn by {degrees:g} degrees"
    title = f"Drift: {turned if synthetic else f'{settings.model.name} from prose to source code'}"
    results_of(found, manifest, title).give(wide_console(), as_json, plot, report)


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
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """The needle grid: is a number found in a haystack, by length and depth, beside dense attention?"""
    from pariskv.cli import wide_console
    from pariskv.compare import check_names
    from pariskv.evaluation.needle import configs_of, measure_needles, results_of
    from pariskv.evaluation.results import manifest_of
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.progress import described_progress
    from pariskv.registry import Registry
    from pariskv.units import parse_list, parse_tokens

    settings, registry = load_config(config, overrides or []), Registry.load()
    names = parse_list(retrievers, str, "--retrievers")
    sizes, places = parse_list(lengths, parse_tokens, "--lengths"), parse_list(depths, _depth, "--depths")
    check_names(settings, names, registry)
    check_files(plot, report)
    model = LanguageModel.load(settings)
    with described_progress() as progress:
        cells = list(measure_needles(model, settings, names, sizes, places, tries, registry, progress))
    used = calibration_of(model, configs_of(settings, names).values())
    manifest = manifest_of("eval needle", context.params, settings, used)
    results_of(cells, manifest, f"Needles in {settings.model.name}").give(wide_console(), as_json, plot, report)


def check_files(plot: Path | None, report: Path | None) -> None:
    """Refuse files that could not be drawn or written, before anything is measured."""
    from pariskv.evaluation.charts import check_plot
    from pariskv.evaluation.page import check_report

    if plot is not None:
        check_plot(plot)
    if report is not None:
        check_report(report)


def calibration_of(model: LanguageModel, configs: Iterable[Config]) -> str | None:
    """The file of the model's query statistics, where a layer of one of the configurations is encoded by them."""
    return next((used for config in configs if (used := model.new_cache(config).calibration)), None)


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


def only_layers(known: Iterable[int], layers: str | None) -> list[int]:
    """The layers that are listed, all that are known without a list; ConfigError for others."""
    from pariskv.units import one_of, parse_list

    known = list(known)
    return known if layers is None else [*map(int, parse_list(layers, one_of(tuple(map(str, known))), "--layers"))]


def _model_traces(
    settings: Config, names: Sequence[str], tokens: int, steps: int, layers: str | None
) -> tuple[Any, Any, str | None]:
    """The model's layers along prose, then source code; the moments of its calibration, and the file if it is used."""
    from pariskv.compare import config_for
    from pariskv.evaluation.drift import TOP_K, model_traces
    from pariskv.evaluation.fidelity import refuse_length
    from pariskv.integrations.calibration import find_calibration
    from pariskv.integrations.geometry import full_attention_layers
    from pariskv.integrations.language_model import LanguageModel

    model = LanguageModel.load(settings)
    followed = only_layers(full_attention_layers(model.model), layers)
    refuse_length(model, settings, tokens, steps)
    kept = find_calibration(model.model)
    used = calibration_of(model, [config_for(settings, name, TOP_K) for name in names])
    prose, code = texts.STANDARD["prose-1"](), texts.STANDARD["source-1"]()
    traces = model_traces(model, prose, code, tokens, steps)
    return {index: traces[index] for index in followed}, None if kept is None else kept.moments, used


def calibrate(config: Config, text_files: list[Path], tokens: int | None) -> None:
    """The work of `pariskv calibrate`: measure the model's queries, keep them, say where."""
    from pariskv.integrations.calibrate import TOKENS, calibrate
    from pariskv.integrations.calibration import file_of, save_calibration
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.progress import described_progress

    samples = [texts.read_text(file) for file in text_files] or [text() for text in texts.CALIBRATION.values()]
    model = LanguageModel.load(config)
    with described_progress() as progress:
        found = calibrate(model, samples, tokens or TOKENS, lambda done, total: progress("calibrating", done, total))
    path = file_of(model.model)
    save_calibration(found, path)
    print(f"{config.model.name}: queries of {found.about['tokens']:,} tokens in {len(found.moments)} layers, {path}")
