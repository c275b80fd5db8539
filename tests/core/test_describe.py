"""What `pariskv plugins NAME` says about a retriever."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from fakes import Full, registry_of

from pariskv.cli import main
from pariskv.describe import describe_retriever, options_of
from pariskv.errors import ConfigError


@dataclass(frozen=True)
class Options:
    page: int  # tokens per page
    keep: float = 0.5  # share of the pages, 0 < keep <= 1
    names: list[str] = field(default_factory=list, metadata={"help": "from the metadata"})


def test_options_have_types_defaults_and_the_comments_behind_them() -> None:
    found = [(one.name, one.type, one.default, one.help) for one in options_of(Options)]
    assert found == [
        ("page", "int", None, "tokens per page"),
        ("keep", "float", "0.5", "share of the pages, 0 < keep <= 1"),
        ("names", "list[str]", "[]", "from the metadata"),
    ]
    assert list(options_of(None)) == []


def test_a_retriever_is_described_by_its_docstring_and_stages() -> None:
    described = describe_retriever("pariskv", registry_of())
    assert described.summary == (Full.__doc__ or "").strip()
    assert described.row.stages == ("allocate_codes", "encode", "encode_query", "coarse_select", "rerank")
    assert described.options == ()


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"plugins: unknown retriever 'resdent' \(did you mean 'resident'\?\)"):
        describe_retriever("resdent", registry_of())


def test_the_command_prints_the_options_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--json",)):
        with pytest.raises(SystemExit) as done:
            main(["plugins", "quest", *more])
        assert done.value.code == 0
        out = capsys.readouterr().out
        assert "page_size" in out
        assert "retriever" in out
    assert json.loads(out)["options"][0]["default"] is not None
