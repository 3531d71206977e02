"""Blocks of code in a page of docs/, and what the page says that each prints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADDRESS = "http://127.0.0.1:11434"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


@dataclass(frozen=True)
class Example:
    """language: of the block; printed: what stands behind it, if anything does."""

    line: int
    language: str
    code: str
    printed: str | None

    @property
    def name(self) -> str:
        return f"line-{self.line}"

    def at(self, url: str) -> str:
        """The code with a server's own address."""
        assert ADDRESS in self.code, "the example asks another server"
        return self.code.replace(ADDRESS, url)

    def check(self, printed: str) -> None:
        """Whether this is what the page says. … in it stands for anything within a line."""
        assert self.printed is not None, "the page does not say what this prints"
        told = re.escape(self.printed.strip()).replace("…", "[^\n]*?")
        assert re.fullmatch(told, printed.strip()), printed


def examples(page: str, language: str) -> list[Example]:
    """Of a page, such as `api.md`."""
    text = (DOCS / page).read_text("utf-8")
    return [
        Example(text.count("\n", 0, found.start()) + 1, *found.groups())
        for found in _BLOCK.finditer(text)
        if found[1] == language
    ]
