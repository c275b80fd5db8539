"""Every page in headless Chromium, as a reader on a desk and one with a phone see it."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.fences import names

api = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright (the dev extra)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium; on Debian and Ubuntu: apt-get install chromium"
)

WIDTHS = {"desktop": (1280, 800), "phone": (390, 844)}
Open = Callable[..., Any]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the built site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=WIDTHS)
def open_page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Open]:
    """Opens a page in one tab of that width, and gives the tab with what went wrong."""
    width, height = WIDTHS[request.param]
    context = browser.new_context(viewport={"width": width, "height": height})
    tab, wrong = context.new_page(), []
    tab.on("console", lambda message: wrong.append(f"console: {message.text}") if message.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    tab.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}") if is_failure(request) else None)
    tab.on("response", lambda answer: wrong.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None)
    tab.on("request", lambda request: None if is_own(request.url, address) else wrong.append(f"other: {request.url}"))

    def open_it(name: str) -> tuple[Any, list[str]]:
        wrong.clear()
        tab.goto(f"{address}/{name.removesuffix('index')}", wait_until="load")
        return tab, wrong

    yield open_it
    context.close()


def is_failure(request: Any) -> bool:
    """Not a request of the page before, which ended with it."""
    return bool(request.failure != "net::ERR_ABORTED")


def is_own(url: str, address: str) -> bool:
    return url.startswith((f"{address}/", "data:", "blob:"))


@pytest.mark.parametrize("name", names())
def test_a_page_opens_without_errors_and_fits_the_screen(open_page: Open, site: Path, address: str, name: str) -> None:
    tab, wrong = open_page(name)
    assert tab.title()
    # Images below the screen are loaded when they are scrolled to.
    assert (
        tab.evaluate(
            """() => Promise.all([...document.images].map(async image => {
            image.loading = "eager"
            await image.decode().catch(() => {})
            return image.naturalWidth ? "" : image.src
        }))"""
        )
        == [""] * tab.locator("img").count()
    )
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    links = tab.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)")
    assert [link for link in links if is_own(link, address) and not leads_somewhere(link, site)] == []
    assert wrong == []


def leads_somewhere(link: str, site: Path) -> bool:
    """A file of the site; anchors are looked for in test_site.py."""
    path = site / unquote(urlsplit(link).path).lstrip("/")
    return (path / "index.html" if path.is_dir() else path).is_file()


def test_the_search_finds_offload(open_page: Open) -> None:
    tab, wrong = open_page("index")
    # Before the index is there, the line above the results says that it is being read.
    tab.wait_for_function("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
    tab.keyboard.press("/")  # a phone has a button for it, and the same field
    tab.locator("input.md-search__input").press_sequentially("offload")
    results = tab.locator("a.md-search-result__link")
    results.first.wait_for(state="visible")
    assert any("/offload/" in result.get_attribute("href") for result in results.all())
    assert wrong == []


@pytest.mark.parametrize(("preferred", "scheme"), [("light", "default"), ("dark", "slate")])
def test_the_colours_are_those_that_the_reader_prefers(browser: Any, address: str, preferred: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=preferred)
    tab = context.new_page()
    tab.goto(f"{address}/memory-layout/")
    shade = "document.body.getAttribute('data-md-color-scheme')"
    assert tab.evaluate(shade) == scheme
    text, paper = brightness(tab, ".pk-figure .t", "fill"), brightness(tab, "body", "backgroundColor")
    assert (text < paper) == (preferred == "light")
    assert abs(text - paper) > 300
    context.close()


def brightness(tab: Any, selector: str, what: str) -> int:
    """Red, green and blue of a computed colour, added: 0 to 765."""
    colour = tab.evaluate(
        "([selector, what]) => getComputedStyle(document.querySelector(selector))[what]", [selector, what]
    )
    return sum(map(int, re.findall(r"\d+", colour)[:3]))
