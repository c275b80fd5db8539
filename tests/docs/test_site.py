"""The built pages: complete, linked, and served from nowhere else."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import pariskv
from pariskv import errors, types
from pariskv.binding import LayerPipeline
from pariskv.config import describe_schema
from pariskv.hookspecs import PluginSpec, StageSpec
from pariskv.registry import Registry
from pariskv.report import Report
from pariskv.stages import STAGES, Traits
from pariskv.window import Window
from tests.docs.fences import names, page


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
    return read(site / "index.html" if name == "index" else site / name / "index.html")


def first_cells(site: Path, name: str) -> set[str]:
    """The first cell of every table row of a page, without markup."""
    html = (site / name / "index.html").read_text(encoding="utf-8")
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


def test_both_diagrams_are_part_of_their_page(site: Path) -> None:
    html = (site / "how-it-works" / "index.html").read_text(encoding="utf-8")
    assert html.count('class="pk-figure"') == 2
    assert 'src="../img/' not in html


def test_nothing_generated_is_missing(site: Path) -> None:
    assert [path for path in site.rglob("*.html") if "<!-- generated:" in path.read_text(encoding="utf-8")] == []


def test_every_key_of_the_schema_is_on_the_configuration_page(site: Path) -> None:
    assert {row.path for row in describe_schema()} - first_cells(site, "configuration") == set()


def test_every_builtin_retriever_is_described(site: Path) -> None:
    registry = Registry.load(entry_points=False)
    assert set(registry.names()) - first_cells(site, "configuration") == set()
    assert [name for name in registry.names() if f"\n## {name}\n" not in page("retrievers")] == []
    for name in registry.names():
        for item in fields(registry.retrievers[name][0].options or _None):
            assert f"{name} {item.name} " in built(site, "configuration").text.replace("\n", " ")


@dataclass
class _None:
    """No options."""


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
    public = {name for name, value in vars(errors).items() if isinstance(value, type)}
    public |= {name for name, value in vars(types).items() if getattr(value, "__module__", "") == types.__name__}
    assert public - short == set()
    assert "&gt;&gt;&gt;" not in text


def test_every_field_of_the_report_is_explained() -> None:
    assert [item.name for item in fields(Report) if f"`{item.name}`" not in page("quickstart")] == []


def test_the_figures_of_the_window_example_are_those_of_the_code() -> None:
    window = Window(64, 256, 256, 2000)
    assert (window.zone(4000), window.ring(4000, 3584), window.zone(4160)) == (3584, 352, 3840)
    assert window.zone(4159) == 3584
    assert all(figure in page("how-it-works") for figure in ("3584", "352", "544", "160", "3840"))


def test_the_index_takes_as_many_bytes_as_the_pages_say(site: Path) -> None:
    assert "pariskv-paper pariskv-m8 56 B 112 B 224 B" in built(site, "retrievers").text
    assert "keys and values 256 B 512 B 1024 B" in built(site, "retrievers").text
    assert "| together | | 112 |" in page("how-it-works")


def test_the_docs_speak_of_pipelines_that_exist() -> None:
    assert {"coarse_select", "rerank", "fetch", "update", "attend"} <= {item.name for item in fields(LayerPipeline)}


@pytest.mark.parametrize("name", names())
def test_pages_have_one_title_and_no_tabs(name: str) -> None:
    text = re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    assert "\t" not in text
    assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == (0 if name == "changelog" else 1)
