"""A report as a browser's parser sees it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.cli.command import hpcgen

VOID = {"meta", "link", "br", "path", "input"}


@dataclass
class Page(HTMLParser):
    """A report as a browser's parser sees it."""

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    unclosed: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.unclosed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.unclosed and self.unclosed[-1] not in ("style", "script"):
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    @property
    def charts(self) -> list[str]:
        return [
            str(attributes["id"]) for tag, attributes in self.tags if tag == "figure" and "id" in attributes
        ]

    @property
    def values(self) -> dict[str, Any]:
        """The data that the script shows under the pointer."""
        [data] = re.findall(
            r'<script type="application/json" id="data">(.*?)</script>', self.source, re.DOTALL
        )
        return json.loads(data)

    def series(self, chart: str, number: int = 0) -> dict[str, Any]:
        values = self.values
        series = values["charts"][chart]["series"][number]
        return series | {"x": values["places"][series["x"]]}


def report(run: Path, *more: object, warning: str = "") -> Page:
    ended = hpcgen("report", run, *more, "-o", "report.html")
    assert (ended.status, ended.stderr) == (0, f"{warning}wrote report.html\n")
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert page.unclosed == []
    return page
