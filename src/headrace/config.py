"""The one truth for settings: a frozen value whose environment names and documentation derive from its fields.

Only this module reads the environment.
"""

from __future__ import annotations

import configparser
import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace.errors import SettingError

PREFIX = "HEADRACE_"
PYPI = "https://pypi.org/simple"
MAX_THREADS = 1024


def _setting(default: Any, about: str, *, secret: bool = False) -> Any:
    return field(default=default, repr=not secret, metadata={"about": about})


@dataclass(frozen=True)
class Settings:
    """What the environment says. A field `name` is read from HEADRACE_NAME."""

    home: Path = _setting(Path("~/.headrace"), "folder of models, downloads and converted files")
    kernels: str | None = _setting(
        None, "kernel tier: auto, amx, avx512, avx2, neon, portable or reference"
    )
    threads: int | None = _setting(
        None, "threads of the native kernels; every usable processor by default"
    )
    index: str | None = _setting(
        None, "package index that `pull` asks; pip's own setting, or PyPI, by default"
    )
    api_key: str | None = _setting(
        None, "key that clients of `serve` have to bring; it needs none on loopback", secret=True
    )


# Read by the tests and by nothing else.
_TEST_NAMES = {"HEADRACE_TEST_HOME", "HEADRACE_TEST_MODELS", "HEADRACE_TEST_MOE"}


def load(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of an environment, the process's by default. Raises SettingError."""
    env = os.environ if environment is None else environment
    known = {PREFIX + f.name.upper(): f.name for f in fields(Settings)}
    for name in env:
        if name.startswith(PREFIX) and name not in known and name not in _TEST_NAMES:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise SettingError(
                f"environment variable {name} is not known", hint=f"did you mean {near[0]}?"
            )
    given = {known[n]: v for n, v in env.items() if n in known and v != ""}
    return Settings(**{name: _parse(name, value) for name, value in _with_home(given).items()})


def check_threads(threads: int) -> int:
    """A number of threads as it is. Raises SettingError for one that no kernel takes."""
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise SettingError(f"threads is {threads!r:.40}; it must be between 1 and {MAX_THREADS}")
    return threads


def package_index(environment: Mapping[str, str] | None = None) -> str:
    """The package index to pull from: the settings', else pip's own, else PyPI."""
    env = os.environ if environment is None else environment
    return load(env).index or env.get("PIP_INDEX_URL") or _pip_index(env) or PYPI


def _pip_index(env: Mapping[str, str]) -> str | None:
    """What pip's configuration files say; a later file overrides an earlier one."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(_pip_files(env), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise SettingError(f"pip's configuration cannot be read: {error}") from None
    return parser.get("global", "index-url", fallback=None)


def _pip_files(env: Mapping[str, str]) -> list[Path]:
    """pip's configuration files, the system's first; the null device as PIP_CONFIG_FILE turns all off."""
    own = env.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return []
    home = Path(env.get("HOME") or Path.home())
    shared = env.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(folder) / "pip/pip.conf" for folder in shared.split(os.pathsep)]
    files += [Path("/etc/pip.conf"), home / ".pip/pip.conf", user / "pip/pip.conf"]
    return [*files, Path(sys.prefix) / "pip.conf", *([Path(own)] if own else [])]


def _with_home(given: dict[str, str]) -> dict[str, str]:
    return {"home": str(Settings.home), **given}


def _parse(name: str, value: str) -> Any:
    if name == "home":
        return Path(value).expanduser()
    if name == "threads":
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise SettingError(f"{PREFIX}THREADS is {value!r}; it must be a positive number")
        return int(value)
    return value


def table() -> str:
    """The settings as a Markdown table."""
    rows = [
        f"| `{PREFIX}{f.name.upper()}` | `{'' if f.default is None else f.default}` | {f.metadata['about']} |"
        for f in fields(Settings)
    ]
    return "\n".join(["| variable | default | what it sets |", "|---|---|---|", *rows])
