"""The command line: `pariskv run | plan | prefix | compare | eval | calibrate | plugins | new-plugin | config | model |
bench`.

What a user can mend is one line on standard error and exit code 2; Ctrl-C is exit code 130.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pariskv.bench.cli import bench_app
from pariskv.config import Config, layer_range, load_config, parse_config, to_yaml
from pariskv.errors import CapacityError, ConfigError, ParisKVError, described
from pariskv.evaluation.tasks.cli import eval_app
from pariskv.plugin_cli import new_plugin, plugins
from pariskv.prefix.cli import prefix_app
from pariskv.progress import described_progress
from pariskv.units import parse_bytes, parse_tokens, with_option

if TYPE_CHECKING:
    from pariskv.needle import Needle
    from pariskv.session import Run, Session

BAD_INPUT = 2
INTERRUPTED = 130
FAILED = 1

app = typer.Typer(
    help="Long-context decoding that retrieves the few keys and values that matter.",
    add_completion=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at a configuration.")
model_app = typer.Typer(help="Put models on this machine.")
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")
app.add_typer(prefix_app, name="prefix")
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.command()(plugins)
app.command()(new_plugin)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="values that replace the file's")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="what to answer; without one, the needle test")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="the same, from a text file")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="tokens to generate at most")] = None,
    compare: Annotated[str | None, typer.Option(help="dense: answer with dense attention too")] = None,
    prompts: Annotated[Path | None, typer.Option(help='many prompts, JSON lines such as {"prompt": "..."}')] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="of --prompts: answered at a time, 8 without")] = None,
    output: Annotated[Path | None, typer.Option(help="of --prompts: results as JSON lines, in input order")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="of --prompts: go on with an interrupted --output")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt and show what retrieval saved; or answer a file of prompts."""
    from pariskv.serving.cli import DEFAULT_BATCH, check_options, run_prompts
    from pariskv.session import Session, run_to_dict

    if compare not in (None, "dense"):
        raise ConfigError(f"--compare: got {compare!r}, wanted dense")
    check_options(
        prompts,
        {"--prompt": prompt, "--prompt-file": prompt_file, "--compare": compare, "--json": as_json},
        {"--batch-size": batch_size, "--output": output, "--resume": resume},
    )
    settings = load_config(config, _with_tokens(overrides or [], max_new_tokens))
    _check_names(settings)
    if prompts is not None:
        run_prompts(settings, prompts, batch_size or DEFAULT_BATCH, output, resume)
        return
    text = _prompt(prompt, prompt_file)
    session = Session.load(settings)
    needle = session.needle() if text is None else None
    question = needle.prompt if needle else text or ""
    if needle and not as_json:
        _say(f"needle test: {session.model.count_tokens(question):,} tokens; the answer is {needle.answer}")
    ours = _answer(session, question, needle, as_json, dense=False)
    dense = None
    if compare and not ours.interrupted and not ours.error:
        dense = _answer(session, question, needle, as_json, dense=True)
    if as_json:
        assert ours.report is not None
        found = run_to_dict(ours, settings)
        if dense is not None and dense.report is not None:
            found["compare"] = {**dense.report.to_dict(), "texts_agree": dense.text == ours.text}
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show(_label(settings), ours, dense)
    if ours.error:
        raise CapacityError(ours.error)
    if ours.interrupted or (dense is not None and dense.interrupted):
        raise typer.Exit(INTERRUPTED)


def _with_tokens(overrides: Sequence[str], max_new_tokens: int | None) -> list[str]:
    more = [] if max_new_tokens is None else [f"generation.max_new_tokens={max_new_tokens}"]
    return [*overrides, *more]


def _prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """The user's prompt, None where there is none."""
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file: got both, wanted one")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {prompt_file}: cannot be read as UTF-8 text: {error}") from error
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty; give --prompt or --prompt-file some text")
    return prompt


def _answer(session: Session, prompt: str, needle: Needle | None, quiet: bool, dense: bool) -> Run:
    """Run once, with a progress bar for the prefill and the answer as it comes."""
    answer = session.run_dense if dense else session.run
    label = "dense" if dense else _label(session.config)
    started, space = False, ""

    def on_text(piece: str) -> None:
        # White space waits for what follows, so that an answer does not end in empty lines.
        nonlocal started, space
        text = space + piece
        space = text[len(text.rstrip()) :]
        if not quiet and text.rstrip():
            print(text.rstrip() if started else f"{label}: {text.strip()}", end="", flush=True)
            started = True

    with described_progress(until_full=True) as bar:
        run = answer(prompt, needle, on_text, partial(bar, f"prefill ({label})"))
    if started:
        print(flush=True)
    return run


def _label(config: Config) -> str:
    """What the answer and its column are called: the retrievers that choose tokens."""
    from pariskv.explain import layer_retrievers

    return " + ".join(layer_retrievers(config))


def _show(label: str, ours: Run, dense: Run | None) -> None:
    from pariskv.report import as_table

    assert ours.report is not None
    columns = [(label, ours.report)]
    if dense is not None and dense.report is not None:
        columns.append(("dense", dense.report))
    wide_console().print(as_table(columns))
    if dense is not None and not dense.interrupted:
        _say(f"the texts {'agree' if dense.text == ours.text else 'differ'}")
    if ours.interrupted:
        _say("interrupted: the table is about what was generated so far")


@app.command()
def plan(
    config: ConfigPath,
    context: Annotated[str, typer.Option(help="tokens of a row, prompt and new ones together: 32768, 128K")],
    overrides: Overrides = None,
    batch: Annotated[int, typer.Option(min=1, help="rows")] = 1,
    device_memory: Annotated[str | None, typer.Option(help="plan for a GPU of that size, such as 80GB")] = None,
    host_memory: Annotated[str | None, typer.Option(help="memory of its host, such as 512GB")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="of the device's memory, such as 4.8TB/s: says what a step takes at least")
    ] = None,
    bus: Annotated[str | None, typer.Option(help="from host to device, such as 50GB/s, for the same")] = None,
    flops: Annotated[
        str | None, typer.Option(help="of the device's matrices, such as 989TFLOP/s: says what prompts take at least")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a request would take of the memory, and the largest that fits; loads no weights."""
    from pariskv.plan import Machine, as_table, describe
    from pariskv.plan import plan as make_plan
    from pariskv.plan_time import Rates, step_time

    settings = load_config(config, overrides or [])
    _check_names(settings)
    sizes = {name: _size(name, text) for name, text in (("device", device_memory), ("host", host_memory))}
    tokens = with_option("--context", parse_tokens, context)
    rates = Rates.parse(bandwidth, bus, flops)
    machine = Machine.of(settings, sizes["device"], sizes["host"])
    model = describe(settings, machine.device)
    found = make_plan(model, machine, tokens, batch)
    time = None if rates is None else step_time(model, rates, tokens, batch)
    if as_json:
        print(json.dumps(found.to_dict() | ({} if time is None else {"time": time.to_dict()})))
    else:
        wide_console().print(as_table(found, tokens, batch, time))


def _size(name: str, text: str | None) -> int | None:
    return None if text is None else with_option(f"--{name}-memory", parse_bytes, text)


@app.command()
def compare(
    context: typer.Context,
    config: ConfigPath,
    retrievers: Annotated[str, typer.Option(help="retrievers, or the CONFIG's instances of them, with commas")],
    overrides: Overrides = None,
    top_k: Annotated[str | None, typer.Option(help="rows fetched per key/value head and step, with commas")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a text file; without one, the needle test")] = None,
    steps: Annotated[int, typer.Option(help="tokens of dense attention's answer that are decoded")] = 32,
    question: Annotated[
        str,
        typer.Option(
            "--question", "--protocol", help="the prompt's last line: read densely (dense) or decoded (sparse)"
        ),
    ] = "dense",
    plot: Annotated[Path | None, typer.Option(help="draw quality against --top-k, by default 32,64,128,256")] = None,
    report: Annotated[Path | None, typer.Option(help="write a page to look at, one HTML file")] = None,
    as_json: AsJson = False,
) -> None:
    """Retrievers side by side on one prompt, at the same budget, measured against dense attention."""
    from pariskv.compare import Comparison, check_names, config_for, parse_settings
    from pariskv.compare_output import results_of
    from pariskv.evaluation.cli import calibration_of, check_files
    from pariskv.evaluation.results import manifest_of
    from pariskv.registry import Registry
    from pariskv.session import Session

    settings = load_config(config, overrides or [])
    wanted = parse_settings(retrievers, top_k, steps, question, settings, plotted=plot is not None)
    check_names(settings, wanted.retrievers, Registry.load())
    for name in wanted.retrievers:
        _check_names(config_for(settings, name, wanted.budgets[0]))
    check_files(plot, report)
    text = _prompt(None, prompt_file)
    session, found, interrupted = Session.load(settings), [], False
    comparison = Comparison(session.model, settings, wanted)
    chat = "off" if text is None else settings.generation.chat
    with described_progress() as progress:
        try:
            for budget, row in comparison.rows(text or session.needle().prompt, chat, progress):
                found.append((budget, row))
        except KeyboardInterrupt:
            interrupted = True
    used = calibration_of(session.model, [config_for(settings, name, wanted.budgets[0]) for name in wanted.retrievers])
    manifest = manifest_of("compare", context.params, settings, used)
    title = f"Retrievers on {settings.model.name}"
    results_of(found, manifest, title).give(wide_console(200), as_json, plot, report if found else None)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@config_app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved configuration as YAML."""
    print(to_yaml(load_config(config, overrides or [])), end="")


@config_app.command()
def validate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a configuration, and say which retriever gives each stage and which keys have no effect."""
    from pariskv.explain import explain
    from pariskv.registry import Registry

    settings = load_config(config, overrides or [])
    _check_names(settings)
    _say("\n".join([f"{config}: fine", *explain(settings, Registry.load())]))


def _check_names(config: Config) -> None:
    """Bind the layers that the configuration speaks of, before a model is loaded that knows how many there are."""
    from pariskv.binding import bind
    from pariskv.registry import Registry

    first = {layer_range(key)[0] for key in config.layers if key != "default"}
    last = max((layer_range(key)[-1] for key in config.layers if key != "default"), default=0)
    bind(config, last + 2, Registry.load(), {*first, last + 1})


@app.command()
def calibrate(
    config: ConfigPath,
    overrides: Overrides = None,
    text_file: Annotated[
        list[Path] | None, typer.Option(help="a text to read, may be repeated; without one, prose and source code")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of each text, 2048 without")] = None,
) -> None:
    """Measure once what a model's queries look like, and keep it: the retriever `pariskv` encodes keys by it."""
    from pariskv.evaluation import cli

    cli.calibrate(load_config(config, overrides or []), text_file or [], tokens)


@model_app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2-135m")]) -> None:
    """Download a model and make it ready, where the hub cannot be reached too."""
    from pariskv.integrations.fetch import fetch_model
    from pariskv.integrations.models import DEFAULT_MODEL

    fetch_model(name, Console())
    if name == DEFAULT_MODEL:
        _calibrate_once(name)


def _calibrate_once(name: str) -> None:
    """Calibrate a model that was just fetched, unless that was done before."""
    from pariskv.integrations.calibrate import ensure_calibrated
    from pariskv.integrations.language_model import LanguageModel

    started = time.perf_counter()
    model = LanguageModel.load(parse_config({"model": {"name": name}}))
    if path := ensure_calibrated(model):
        _say(f"calibrate on texts of the standard library, once: {time.perf_counter() - started:.1f} s, {path}")


def wide_console(width: int = 160) -> Console:
    """Standard output, as wide as a table needs where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: runs a command and turns what goes wrong into one line and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    with _logs_on_stderr():
        code = _exit_code(arguments, debug)
    sys.exit(code)


@contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """Show what a user waits for or should know: kernels being compiled, and what could not be done as asked."""
    handler = logging.StreamHandler(sys.stderr)
    levels = {"pariskv": logging.WARNING, "pariskv_plugins": logging.WARNING, "pariskv_kernels": logging.INFO}
    loggers = [logging.getLogger(name) for name in levels]
    for logger, level in zip(loggers, levels.values(), strict=True):
        logger.setLevel(level)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _exit_code(arguments: list[str], debug: bool) -> int:
    try:
        code = app(arguments or ["--help"], standalone_mode=False, prog_name="pariskv")
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", INTERRUPTED, debug)
    except Exception as error:
        if isinstance(error, ParisKVError):
            return _failed(described(error), BAD_INPUT, debug)
        # typer brings click along or depends on it, by version: its usage errors are known by what they can do.
        if hasattr(error, "format_message"):
            return _failed(error.format_message(), BAD_INPUT, debug)
        return _failed(described(error), FAILED, debug)


def _failed(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}{'' if debug else _hint(code)}", file=sys.stderr)
    return code


def _hint(code: int) -> str:
    return " (--debug shows where)" if code == FAILED else ""
