"""Reads a page of `--report` as a browser would, and refuses what is not valid or not in the file."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements are closed in their order, and collects what could be fetched or would run."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} runs {name}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
                self.links.append(value or "")
            self.links += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] == "style":
            assert not re.search(r"url\(|@import", data)


def read_page(text: str) -> Page:
    """The page, after everything that makes it one self-contained file was looked at."""
    found = Page(text)
    assert text.startswith("<!doctype html>")
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links), found.links
    assert len(found.ids) == len(set(found.ids))
    assert not {"script", "link", "iframe", "img", "image", "object"} & set(found.tags)
    assert "http" not in text
    return found
