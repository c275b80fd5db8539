"""The command reference: every command of the program with its usage, help, arguments and options."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from markup import code, table
from typer.models import OptionInfo

from pariskv.cli import app
from pariskv.structured import type_name


@dataclass(frozen=True)
class Command:
    """A command by its whole name; `params` are those of the parser, `function` is what they are passed to."""

    name: str
    help: str
    params: list[Any]
    function: Callable[..., object]


def commands() -> list[Command]:
    """Every command that can be run, in the program's order."""
    return list(_walk(typer.main.get_command(app), "pariskv"))


def _walk(command: Any, name: str) -> Iterator[Command]:
    children = getattr(command, "commands", None)
    if children is None:
        params = [param for param in command.params if not getattr(param, "hidden", False)]
        yield Command(name, " ".join((command.help or "").split()), params, command.callback)
        return
    for key, child in children.items():
        yield from _walk(child, f"{name} {key}")


def overview() -> str:
    """A line for each command, with a link to its section."""
    rows = ((f"[`{one.name}`](#{one.name.replace(' ', '-')})", one.help) for one in commands())
    return table(("Command", "Does"), rows)


def reference() -> str:
    """A section for each command."""
    return "\n\n".join(_section(command) for command in commands())


def _section(command: Command) -> str:
    hints = get_type_hints(_origin(command.function), include_extras=True)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    parts = [
        f"### {command.name.removeprefix('pariskv ')} {{ #{command.name.replace(' ', '-')} }}",
        f"```console\n$ {usage(command)}\n```",
        command.help,
    ]
    if arguments:
        parts.append(
            table(("Argument", "Type", "Meaning"), (_argument(param, hints[param.name]) for param in arguments))
        )
    if options:
        rows = (_option(param, hints[param.name]) for param in options)
        parts.append(table(("Option", "Type", "Default", "Meaning"), rows))
    return "\n\n".join(parts)


def _origin(function: Callable[..., object]) -> Callable[..., object]:
    return getattr(function, "__wrapped__", function)


def usage(command: Command) -> str:
    """What is typed: arguments and required options by name, other options together."""
    words = [command.name]
    words += [_placeholder(param) for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    words += [f"{param.opts[0]} {param.metavar or 'VALUE'}" for param in options if param.required]
    if any(not param.required for param in options):
        words.append("[options]")
    return " ".join(words)


def _placeholder(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _argument(param: Any, hint: Any) -> tuple[str, ...]:
    return code(_placeholder(param)), _type(hint), _sentence(param)


def _option(param: Any, hint: Any) -> tuple[str, ...]:
    names = ", ".join(code(name) for name in (*param.opts, *param.secondary_opts))
    return names, _type(hint), _default(param), _sentence(param)


def _type(hint: Any) -> str:
    """The type without what says that the option may be left out, and its least value where it has one."""
    base, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(base) in (Union, types.UnionType):
        (base,) = [part for part in get_args(base) if part is not type(None)]
    least = next((note.min for note in notes if isinstance(note, OptionInfo)), None)
    name = "flag" if base is bool else type_name(base)
    return name if least is None else f"{name} ≥ {least:g}"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.secondary_opts:
        return code(param.opts[0] if param.default else param.secondary_opts[0])
    return "" if param.default is None or param.default is False else code(param.default)


def _sentence(param: Any) -> str:
    """The help, with braces that Markdown's attribute lists leave alone."""
    return str(param.help or "").replace("{", "\\{")
