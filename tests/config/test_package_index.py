"""The package index is the setting, else what pip is told, else the public one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import config
from headrace.errors import SettingError


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which no configuration of this machine counts."""
    monkeypatch.setattr(config.sys, "prefix", str(tmp_path / "prefix"))
    return {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def pip_says(path: Path, index: str) -> Path:
    return write(path, f"[global]\ntimeout = 9\nindex-url = {index}\n")


def test_without_anything_it_is_the_public_index(env: dict[str, str]) -> None:
    assert config.package_index({**env, "PIP_CONFIG_FILE": os.devnull}) == config.PYPI


def test_the_setting_wins_then_pips_variable_then_its_files(
    env: dict[str, str], tmp_path: Path
) -> None:
    env["PIP_CONFIG_FILE"] = str(pip_says(tmp_path / "own.conf", "https://file.example/%7Ea"))
    assert config.package_index(env) == "https://file.example/%7Ea"
    env["PIP_INDEX_URL"] = "https://variable.example"
    assert config.package_index(env) == "https://variable.example"
    env["HEADRACE_INDEX"] = "https://setting.example"
    assert config.package_index(env) == "https://setting.example"


def test_a_later_file_overrides_an_earlier_one(env: dict[str, str], tmp_path: Path) -> None:
    for path in ("xdg/pip/pip.conf", ".pip/pip.conf", ".config/pip/pip.conf", "prefix/pip.conf"):
        pip_says(tmp_path / path, f"https://index.example/{path}")
        assert config.package_index(env) == f"https://index.example/{path}"
    assert config.package_index({**env, "PIP_CONFIG_FILE": os.devnull}) == config.PYPI


def test_a_configuration_that_cannot_be_read_is_refused(
    env: dict[str, str], tmp_path: Path
) -> None:
    env["PIP_CONFIG_FILE"] = str(write(tmp_path / "own.conf", "index-url = x\n"))
    with pytest.raises(SettingError, match="pip's configuration cannot be read"):
        config.package_index(env)
