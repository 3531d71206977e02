"""The flags of the prefix cache's disk tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from headrace.engine.prefix_disk import (
    DEFAULT_DISK_GB,
    DEFAULT_MAX_AGE_DAYS,
    DEFAULT_MIN_TOKENS,
    DiskOptions,
)
from headrace.errors import SettingError


def folder(kind: object, tokens: Sequence[Token]) -> Path:
    """A flag's folder. Raises SettingError for an empty one, which as a path would be the current folder."""
    (token,) = tokens
    if not token.value:
        raise SettingError(f"{token.keyword or 'the folder'} is empty; it must be a folder")
    return Path(token.value)


@Parameter(name="*")
@dataclass(frozen=True)
class PrefixOptions:
    """Flags of where prefixes are kept beyond the process. `None` is not given."""

    prefix_cache_dir: Annotated[
        Path | None,
        Parameter(
            converter=folder,
            help=(
                "Keep what was read and answered in this folder, so that a later process reads only"
                " what is new of a prompt. It holds the tokens of conversations, for the owner alone."
            ),
        ),
    ] = None

    prefix_cache_disk_gb: Annotated[
        float | None,
        Parameter(
            help=(
                "Most GB (10^9 bytes) of that folder. What nobody continued goes first, then"
                " conversations, then what several conversations start with."
                f" {DEFAULT_DISK_GB:g} if not given."
            )
        ),
    ] = None

    prefix_cache_min_tokens: Annotated[
        int | None,
        Parameter(
            help=f"Do not write prefixes of fewer tokens to it; {DEFAULT_MIN_TOKENS} if not given."
        ),
    ] = None

    prefix_cache_max_age_days: Annotated[
        float | None,
        Parameter(
            help=(
                "Remove from it what was not used for so long; 0 keeps it."
                f" {DEFAULT_MAX_AGE_DAYS:g} if not given."
            )
        ),
    ] = None

    def options(self) -> DiskOptions | None:
        """The same as a value; None without a folder. Raises SettingError."""
        given: dict[str, Any] = {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None
        }
        options = DiskOptions(
            given.pop("prefix_cache_dir", Path()),
            **{name.removeprefix("prefix_cache_"): value for name, value in given.items()},
        )
        if self.prefix_cache_dir is not None:
            return options
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise SettingError(f"{flag} is given without a folder", hint="give --prefix-cache-dir")
        return None


DEFAULT_PREFIX = PrefixOptions()
