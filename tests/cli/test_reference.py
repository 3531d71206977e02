"""The command reference says what the code says."""

from __future__ import annotations

from cli import reference
from headrace.cli.main import COMMANDS


def test_the_reference_is_fresh() -> None:
    assert reference.PAGE.read_text("utf-8") == reference.text()


def test_every_command_and_flag_is_explained() -> None:
    page = reference.text()
    for name in COMMANDS:
        assert f"## headrace {name}\n" in page
    flags = [line for line in page.splitlines() if line.startswith("* `-")]
    assert len(flags) > 20
    assert all("`: " in line for line in flags)
