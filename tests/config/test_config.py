"""Settings come from known environment names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import config
from headrace.errors import SettingError


def test_defaults_and_values() -> None:
    assert config.load({}).threads is None
    assert config.load({}).home == Path.home() / ".headrace"
    got = config.load(
        {
            "HEADRACE_HOME": "/tmp/x",
            "HEADRACE_THREADS": "3",
            "HEADRACE_KERNELS": "avx2",
            "PATH": "/bin",
        }
    )
    assert (got.home, got.threads, got.kernels) == (Path("/tmp/x"), 3, "avx2")
    assert config.load({"HEADRACE_THREADS": ""}).threads is None


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match="HEADRACE_THREAD is not known") as caught:
        config.load({"HEADRACE_THREAD": "2"})
    assert "HEADRACE_THREADS" in (caught.value.hint or "")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "\u0663"])
def test_bad_threads_are_refused(value: str) -> None:
    with pytest.raises(SettingError, match="HEADRACE_THREADS"):
        config.load({"HEADRACE_THREADS": value})


def test_every_setting_is_in_the_documentation() -> None:
    readme = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text()
    assert config.table() in readme
