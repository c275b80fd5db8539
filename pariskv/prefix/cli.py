"""The commands under `pariskv prefix`: read a text once, keep it in a file, go on from there."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pariskv.config import load_config
from pariskv.errors import ConfigError, PrefixError
from pariskv.progress import described_progress

if TYPE_CHECKING:
    from pariskv.prefix import PrefixInfo
    from pariskv.session import Session

prefix_app = typer.Typer(help="Read a long text once, keep it in a file, and go on from there.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file")]
PrefixPath = Annotated[Path, typer.Argument(metavar="PREFIX", help="a file that `pariskv prefix save` wrote")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="values that replace the file's")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


@prefix_app.callback()
def prefix() -> None:
    """Read a long text once, keep it in a file, and go on from there."""


@prefix_app.command()
def save(
    config: ConfigPath,
    out: Annotated[Path, typer.Option(metavar="PREFIX", help="where to: a name that ends in .safetensors")],
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="the text")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="the same, from a text file")] = None,
    as_json: AsJson = False,
) -> None:
    """Read a text and keep what was read: keys, values, codes, and all that going on takes."""
    from pariskv.cli import _check_names, _prompt
    from pariskv.prefix import save_prefix
    from pariskv.session import Session

    settings = load_config(config, overrides or [])
    _check_names(settings)
    text = _prompt(prompt, prompt_file)
    if text is None:
        raise ConfigError("got no text to read; give --prompt-file or --prompt")
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: wanted a name that ends in .safetensors")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is no folder; make it first")
    session = Session.load(settings)
    with described_progress() as show:
        read = session.read_prefix([text], partial(show, "prefill"))
    started = time.perf_counter()
    info = save_prefix(out, read, session.model)
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({**asdict(info), "seconds": seconds}, ensure_ascii=False))
    else:
        print(f"{out}: {_amount(info)}, saved in {seconds:.2f} s ({info.bytes / seconds / 1e6:,.0f} MB/s)")
        print(f"sha256: {info.sha256}")


@prefix_app.command()
def load(
    file: PrefixPath,
    config: ConfigPath,
    overrides: Overrides = None,
    prompt: Annotated[
        str | None, typer.Option(help="what follows the text, a question; without one it goes on")
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="refuse the file unless it is of this text")] = None,
    sha256: Annotated[str | None, typer.Option(help="refuse the file unless it is this one")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="tokens to generate at most")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on from a saved prefix, without reading its text again."""
    from pariskv.cli import _check_names, _prompt, _with_tokens
    from pariskv.prefix import prefix_info
    from pariskv.session import Session

    settings = load_config(config, _with_tokens(overrides or [], max_new_tokens))
    _check_names(settings)
    info, text = prefix_info(file), _prompt(None, text_file)
    if len(info.held["rows"]) != 1:
        raise PrefixError(f"{file}: rows: holds {len(info.held['rows'])}; this command goes on with one, use Python")
    session = Session.load(settings)
    loaded = session.load_prefix(file, None if text is None else [text], sha256)
    assert loaded.read_seconds is not None
    seconds, rate = loaded.read_seconds, info.bytes / loaded.read_seconds
    if not as_json:
        print(f"{file}: {_amount(info)}, loaded in {seconds:.2f} s ({rate / 1e6:,.0f} MB/s)", flush=True)
    tokens, answer = [], ""
    for token, piece in _answer(session, loaded, prompt or ""):
        tokens.append(token)
        answer += piece
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        found = {"text": answer, "tokens": tokens, "prefix_tokens": info.held["rows"][0], "bytes": info.bytes}
        print(json.dumps({**found, "load_seconds": seconds, "bytes_per_s": rate}, ensure_ascii=False))
    else:
        print(flush=True)


def _answer(session: Session, loaded: Any, question: str) -> Any:
    """(token, the text that it completes) of each step."""
    from pariskv.integrations.language_model import TextStream

    text = TextStream(session.model)
    for (token,) in session.continue_prefix(loaded, question):
        assert token is not None
        yield token, text.push(token)


@prefix_app.command()
def info(file: PrefixPath, as_json: AsJson = False) -> None:
    """What a file holds and what it belongs to; reads its header only."""
    from pariskv.cli import wide_console
    from pariskv.prefix import prefix_info

    found = prefix_info(file)
    if as_json:
        print(json.dumps(asdict(found), ensure_ascii=False))
        return
    model = found.belongs["model"]
    table = Table("field", "value", title=str(file), title_justify="left")
    rows = {
        "holds": _amount(found),
        "token ids": f"sha256 {found.held['tokens']}",
        "model": " ".join(part for part in (model["id"], model["revision"], model["class"], model["dtype"]) if part),
        "weights": f"fingerprint {model['fingerprint']}",
        "tokenizer": f"sha256 {found.belongs['tokenizer']}",
        **{f"retriever {name}": _options(one) for name, one in found.belongs["retrievers"].items()},
        "layers": ", ".join(_layers(found)),
        "written by": f"pariskv {found.about['pariskv']}, torch {found.about['torch']}, {found.about['date']}",
        "version, sha256": f"{found.version}, {found.sha256}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    wide_console().print(table)


def _amount(found: PrefixInfo) -> str:
    rows = found.held["rows"]
    return f"{sum(rows):,} tokens{f' in {len(rows)} rows' if len(rows) > 1 else ''}, {found.bytes / 1e6:,.1f} MB"


def _options(retriever: dict[str, Any]) -> str:
    return " ".join([retriever["type"], *(f"{key}={value}" for key, value in retriever["options"].items())])


def _layers(found: PrefixInfo) -> list[str]:
    """Each kind of layer, with how many there are."""
    kinds: dict[str, int] = {}
    for layer in found.belongs["layers"].values():
        stages = layer.get("stages") or {}
        name = "+".join(dict.fromkeys(stages.values())) or ("dense" if layer["kind"] == "retrieval" else layer["kind"])
        kinds[name] = kinds.get(name, 0) + 1
    return [f"{count} {name}" for name, count in kinds.items()]
