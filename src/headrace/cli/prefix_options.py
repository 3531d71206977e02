"""The flags of the prefix cache's disk tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.engine.prefix_disk import (
    DEFAULT_DISK_GB,
    DEFAULT_MAX_AGE_DAYS,
    DEFAULT_MIN_TOKENS,
    DiskOptions,
)


@Parameter(name="*")
@dataclass(frozen=True)
class PrefixOptions:
    """Flags of where prefixes are kept beyond the process. `None` is not given."""

    prefix_cache_dir: Annotated[
        Path | None,
        Parameter(
            help=(
                "Keep what was read and answered in this folder, so that a later process reads only"
                " what is new of a prompt. It holds the tokens of conversations, for the owner alone."
            )
        ),
    ] = None

    prefix_cache_disk_gb: Annotated[
        float,
        Parameter(
            help=(
                "Most GB (10^9 bytes) of that folder. What nobody continued goes first, then"
                " conversations, then what several conversations start with."
            )
        ),
    ] = DEFAULT_DISK_GB

    prefix_cache_min_tokens: Annotated[
        int, Parameter(help="Do not write prefixes of fewer tokens to it.")
    ] = DEFAULT_MIN_TOKENS

    prefix_cache_max_age_days: Annotated[
        float, Parameter(help="Remove from it what was not used for so long; 0 keeps it.")
    ] = DEFAULT_MAX_AGE_DAYS

    def options(self) -> DiskOptions | None:
        """The same as a value; None without a folder. Raises SettingError."""
        options = DiskOptions(
            self.prefix_cache_dir or Path(),
            self.prefix_cache_disk_gb,
            self.prefix_cache_min_tokens,
            self.prefix_cache_max_age_days,
        )
        return None if self.prefix_cache_dir is None else options


DEFAULT_PREFIX = PrefixOptions()
