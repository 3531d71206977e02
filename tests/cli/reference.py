"""Writes docs/commands.md: `PYTHONPATH=tests python -m cli.reference`."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.main import make_app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"


def text() -> str:
    """The reference of every command, from the code."""
    return make_app().generate_docs().replace("# headrace\n", "# Commands\n", 1).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), "utf-8")
