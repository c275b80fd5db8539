"""The examples outside the tutorial: YAML that binds, Python that names what exists, commands that are there."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer

import pariskv
from pariskv.binding import bind
from pariskv.cli import app, main
from pariskv.config import load_config, parse_config
from pariskv.errors import ConfigError
from pariskv.registry import Registry
from tests.docs.fences import ROOT, blocks, names, page

EXAMPLES = [block.text for block in blocks("configuration", "yaml")]
PYTHON = [(name, block) for name in names() for block in blocks(name, "python")]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load(entry_points=False)


@pytest.mark.parametrize("text", [text for text in EXAMPLES if "wrappers" not in text])
def test_the_examples_bind_in_a_model_of_thirty_layers(text: str, registry: Registry) -> None:
    assert len(bind(parse_config(text), 30, registry)) == 30


def test_an_example_of_a_wrapper_is_the_tutorials(registry: Registry) -> None:
    (text,) = [text for text in EXAMPLES if "wrappers" in text]
    with pytest.raises(ConfigError, match="unknown wrapper 'count'"):
        bind(parse_config(text), 1, registry)


def test_codes_from_keeps_one_copy_where_two_would_be_kept_without(registry: Registry) -> None:
    (text,) = [text for text in EXAMPLES if "codes_from" in text]
    count = [
        len(bind(parse_config(one), 1, registry)[0].encoders)
        for one in (text, text.replace("    codes_from: summed\n", ""))
    ]
    assert count == [1, 2]


@pytest.mark.parametrize(("name", "block"), PYTHON, ids=[f"{name}-{i}" for i, (name, _) in enumerate(PYTHON)])
def test_python_names_what_pariskv_offers_and_files_that_exist(name: str, block: object) -> None:
    tree = ast.parse(textwrap.dedent(block.text))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pariskv":
            assert node.attr in pariskv.__all__
        if isinstance(node, ast.ImportFrom) and node.module == "pariskv":
            assert {alias.name for alias in node.names} <= set(pariskv.__all__)
        if isinstance(node, ast.Constant) and str(node.value).startswith("configs/"):
            assert (ROOT / str(node.value)).is_file()


def command_lines() -> list[str]:
    """What the pages have readers type, continued lines joined."""
    texts = [block.text.replace("\\\n", " ") for name in names() for block in blocks(name, "bash")]
    return [line for text in texts for line in text.splitlines() if line.startswith("pariskv ")]


@pytest.mark.parametrize("line", command_lines())
def test_commands_on_the_pages_have_their_options_and_no_others(line: str) -> None:
    command, (_, *words) = typer.main.get_command(app), shlex.split(line, comments=True)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert given <= {name for option in options for name in (*option.opts, *option.secondary_opts)}
    assert {option.opts[0] for option in options if option.required} <= given


def test_the_config_commands_of_the_quickstart_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    lines = [line.partition("#")[0] for block in blocks("quickstart", "bash") for line in block.text.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("pariskv config")]
    assert len(commands) == 2
    for command in commands:
        with pytest.raises(SystemExit) as done:
            main(command)
        assert done.value.code == 0, capsys.readouterr().err


def test_the_line_of_the_quickstart_writes_what_is_in_the_checkout() -> None:
    (line,) = [line for block in blocks("quickstart", "bash") for line in block.text.splitlines() if "echo" in line]
    *_, text, _, path = shlex.split(line)
    assert parse_config(text) == load_config(ROOT / path)


@pytest.mark.parametrize("name", names())
def test_configurations_on_the_pages_exist(name: str) -> None:
    for path in re.findall(r"configs/[\w./-]+", page(name)):
        assert Path(ROOT / path).is_file()
