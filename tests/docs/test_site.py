"""The built pages: complete, linked, and served from nowhere else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer

import pariskv
from pariskv import errors, types
from pariskv.bench.output import read_json
from pariskv.binding import LayerPipeline
from pariskv.cli import app
from pariskv.config import describe_schema, load_config
from pariskv.describe import describe_retriever
from pariskv.hookspecs import PluginSpec, StageSpec
from pariskv.registry import Registry
from pariskv.report import Report
from pariskv.stages import STAGES, Traits
from pariskv.window import Window
from tests.docs.fences import ROOT, names, page


@dataclass
class Html(HTMLParser):
    """What a page links to, loads, offers as anchors, and says."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script", "iframe") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values["href"])

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@lru_cache
def read(path: Path) -> Html:
    html = Html()
    html.feed(path.read_text(encoding="utf-8"))
    return html


def built(site: Path, name: str) -> Html:
    return read(file_of(site, name))


def file_of(site: Path, name: str) -> Path:
    return site / name.removesuffix("index") / "index.html"


def first_cells(site: Path, name: str) -> set[str]:
    """The first cell of every table row of a page, without markup."""
    html = file_of(site, name).read_text(encoding="utf-8")
    return {re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<tr>\s*<td>(.*?)</td>", html)}


def test_every_page_is_built_and_the_hooks_are_not_published(site: Path) -> None:
    for name in names():
        assert built(site, name).text
    assert not (site / "hooks").exists()


def test_no_link_and_no_image_is_broken(site: Path) -> None:
    broken = []
    for path in sorted(site.rglob("index.html")):
        for link in [*(html := read(path)).links, *html.loads]:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.parent.name}: {link}")
            elif url.fragment and target.suffix == ".html" and unquote(url.fragment) not in read(target).anchors:
                broken.append(f"{path.parent.name}: {link} (no such anchor)")
    assert broken == []


def test_the_pages_load_nothing_from_another_host(site: Path) -> None:
    loaded = {load for path in site.rglob("*.html") for load in read(path).loads}
    assert [load for load in loaded if urlsplit(load).netloc] == []


@pytest.mark.parametrize(("name", "count"), [("how-it-works", 2), ("memory-layout", 1), ("graph", 1)])
def test_diagrams_are_part_of_their_page(site: Path, name: str, count: int) -> None:
    html = file_of(site, name).read_text(encoding="utf-8")
    assert html.count('class="pk-figure') == count
    assert 'src="../img/' not in html


def test_the_landing_page_draws_what_was_measured(site: Path) -> None:
    html, text = file_of(site, "index").read_text(encoding="utf-8"), built(site, "index").text
    rows = read_json(ROOT / "docs" / "benchmarks" / "decode.json").rows
    assert html.count('class="pk-chart"') == 2
    assert len(rows) == 3
    assert [row for row in rows if f"{row['ms']:.1f} ms, {row['ratio']:.2f} times as fast" not in text] == []
    (line,) = [line for line in page("metrics").splitlines() if line.startswith("| 128, auto | `pariskv` ")]
    assert f"pariskv{line.split('|')[5].strip()}" in text


def test_nothing_generated_is_missing(site: Path) -> None:
    assert [
        path for path in site.rglob("*.html") if re.search("<!-- (generated|drawn):", path.read_text(encoding="utf-8"))
    ] == []


def test_every_key_of_the_schema_is_on_the_configuration_page(site: Path) -> None:
    assert {row.path for row in describe_schema()} - first_cells(site, "configuration") == set()


def test_every_configuration_of_the_paper_has_its_memory_and_its_time(site: Path) -> None:
    text = built(site, "evaluation").text
    for file in sorted((ROOT / "configs" / "paper").glob("*.yaml")):
        batch = load_config(file, []).evaluation.batch
        memory = re.search(
            rf" {re.escape(file.stem)} (\d+) x ([\d,]+) [\d,]+ ([\d.]+) GB ([\d.]+) GB ([\d.]+) GB ", text
        )
        assert memory is not None
        assert int(memory[1]) == batch
        assert re.search(rf" {re.escape(file.stem)} [\d,]+ [\d, to]+ {batch} ([\d.]+ (h|min) ){{3}}", text)


def test_every_builtin_retriever_has_a_page_with_every_option(site: Path) -> None:
    registry = Registry.load(entry_points=False)
    for name in registry.names():
        described, text = describe_retriever(name, registry), built(site, f"retrievers/{name}").text
        assert {option.name for option in described.options} - first_cells(site, f"retrievers/{name}") == set()
        for option in described.options:
            assert option.help, f"{name}.{option.name} has no comment in its dataclass"
            assert f"{option.name} {option.type} {option.default} {option.help}" in text


@pytest.mark.parametrize("name", Registry.load(entry_points=False).names())
def test_a_retrievers_page_has_all_sections_and_is_in_the_index(name: str) -> None:
    text = page(f"retrievers/{name}")
    wanted = ["Idea", "Good and bad", "Options", "Cost per token", "Declared"]
    assert [title for title in wanted if f"\n## {title}\n" not in text] == []
    assert f"]({name}.md)" in page("retrievers/index")


def test_every_command_and_every_option_is_in_the_reference(site: Path) -> None:
    text = built(site, "cli").text
    found = list(commands(typer.main.get_command(app), "pariskv"))
    assert len(found) > 20
    for name, command in found:
        start = text.index(f"$ {name} ")
        section = text[start : text.find("$ pariskv ", start + 1)]
        assert " ".join(command.help.split()).replace("`", "") in section
        for param in command.params:
            assert [
                opt for opt in (*param.opts, *param.secondary_opts) if opt.startswith("--") and opt not in section
            ] == []
            assert param.help.replace("`", "") in section


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The commands that can be run, by their whole name, as the parser has them."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for key, child in command.commands.items():
        yield from commands(child, f"{name} {key}")


def test_every_hook_and_its_arguments_are_in_the_reference(site: Path) -> None:
    assert {*STAGES, "register_retrievers", *Traits.__annotations__} - first_cells(site, "hook-reference") == set()
    text = built(site, "hook-reference").text
    assert [stage for stage, names in STAGES.items() if f"{stage} {', '.join(names)} " not in text] == []


def test_every_hook_has_its_whole_signature_in_the_reference(site: Path) -> None:
    text = built(site, "hook-reference").text
    for hook in (PluginSpec.register_retrievers, *(getattr(StageSpec, stage) for stage in STAGES)):
        assert f"def {hook.__name__}{inspect.signature(hook)}".replace("'", "") in text
        assert " ".join((inspect.getdoc(hook) or "").split()).replace("`", "") in text.replace("`", "")


def test_the_api_page_has_everything_that_is_public(site: Path) -> None:
    anchors, text = built(site, "api").anchors, built(site, "api").text
    short = {anchor.rpartition(".")[2] for anchor in anchors}
    mentioned = {name for name in pariskv.__all__ if f"pariskv.{name} " in text}
    assert set(pariskv.__all__) - short - mentioned - {"__version__"} == set()
    public = {
        name
        for module in (errors, types)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    assert {"ParisKVError", "noted", "Codes"} <= public
    assert public - short == set()
    assert "&gt;&gt;&gt;" not in text


def test_the_api_page_has_the_fields_of_what_a_plugin_handles(site: Path) -> None:
    text = built(site, "api").text
    for one in (types.LayerInfo, types.CodeField, types.Query, types.Budget, types.Rows, types.Selection):
        declared = [f" {item.name}: {item.type}".replace("'", '"') for item in fields(one)]
        assert [line for line in declared if line not in text] == []


def test_every_field_of_the_report_is_explained() -> None:
    assert [item.name for item in fields(Report) if f"`{item.name}`" not in page("cli")] == []


def test_the_figures_of_the_window_example_are_those_of_the_code() -> None:
    window = Window(64, 256, 256, 2000)
    assert (window.zone(4000), window.ring(4000, 3584), window.zone(4160)) == (3584, 352, 3840)
    assert window.zone(4159) == 3584
    assert all(figure in page("how-it-works") for figure in ("3584", "352", "544", "160", "3840"))


def test_the_index_takes_as_many_bytes_as_the_pages_say(site: Path) -> None:
    assert "pariskv-paper pariskv-m8 56 B 112 B 224 B" in built(site, "retrievers/index").text
    assert "keys and values 256 B 512 B 1024 B" in built(site, "retrievers/index").text
    assert "| together | | 112 |" in page("paris")
    index = built(site, "retrievers/index").text
    found = [re.search(rf" {one} \S+ \d+ B (\d+) B", index) for one in ("pqcache", "quest", "pariskv")]
    assert "{} and {} instead of {} bytes a token (D = 128)".format(*(match[1] for match in found if match)) in page(
        "choose"
    )


def test_the_guides_quote_figures_of_the_page_that_has_their_source() -> None:
    metrics = page("metrics")
    rows = re.findall(r"^\| (\d+ %) \| (0.\d+) \| (0.\d+) \| (0.\d+) \|$", page("choose"), re.MULTILINE)
    assert len(rows) == 2
    for share, *figures in rows:
        assert f"| 100, {share} | `pariskv` | {' | '.join(figures)} |" in metrics
    recalls = re.findall(r"`([\w-]+)`[^`]*? (0\.\d{3})[^`]*? and (0\.\d{3})", page("long-generation"))
    assert [name for name, _, _ in recalls] == ["pariskv", "pariskv-paper", "pqcache"]
    for name, start, end in recalls:
        assert re.search(rf"^\| `{name}` \| \d \| {start} \| {end} \|", metrics, re.MULTILINE)


def test_the_docs_speak_of_pipelines_that_exist() -> None:
    assert {"coarse_select", "rerank", "fetch", "update", "attend"} <= {item.name for item in fields(LayerPipeline)}


@pytest.mark.parametrize("name", names())
def test_pages_have_one_title_and_no_tabs(name: str) -> None:
    text = re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    assert "\t" not in text
    assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == (0 if name == "changelog" else 1)
