"""`headrace prefix-cache`: what a folder of `--prefix-cache-dir` holds. Loads no model."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headrace import config
from headrace.cli.prefix_options import folder
from headrace.engine import prefix_disk
from headrace.engine.prefix_disk import Survey
from headrace.errors import FileError

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
FOLDER = "prefix-cache"
_ABOUT = {"state": "not continued", "turn": "conversation", "head": "start of several"}


def prefix_cache(
    *,
    dir: Annotated[Path | None, Parameter(show_default=False, converter=folder)] = None,
    clear: Flag = False,
    json: Flag = False,
) -> int:
    """Show what a folder of `run --prefix-cache-dir` holds, or clear it.

    A conversation is kept as segments, each of which holds the tokens that are new in it, so what conversations
    share is there once. Showing changes nothing, also while a process uses the folder.

    Parameters
    ----------
    dir
        The folder; `prefix-cache` under the home folder if not given.
    clear
        Remove every segment. Refused while a process uses the folder; what cannot be removed is named.
    json
        Print one JSON object.
    """
    directory = config.load().home / FOLDER if dir is None else dir
    if dir is not None and not dir.exists():
        raise FileError(dir, "folder", "does not exist")
    if clear:
        return _clear(directory, json)
    found = prefix_disk.survey(directory)
    facts = _facts(directory, found)
    print(json_text.dumps(facts, indent=1) if json else "\n".join(_lines(facts)))
    return 0


def _clear(directory: Path, json: bool) -> int:
    gone, left = prefix_disk.clear(directory)
    names = [f"{error.filename}: {error.strerror}" for error in left]
    if json:
        print(json_text.dumps({"directory": str(directory), "removed": gone, "left": names}))
    else:
        print(f"{directory}: {gone} files removed")
    for line in names:
        print(f"error: not removed: {line}", file=sys.stderr)
    return 1 if left else 0


def _facts(directory: Path, found: Survey) -> dict[str, Any]:
    """Everything that is shown. Sizes in bytes."""
    return {
        "directory": str(directory),
        "bytes": sum(s.label.nbytes for s in found.segments),
        "segments": [
            {
                "id": s.id.hex(),
                "model": s.label.identity.hex(),
                "kind": s.kind,
                "tokens": s.label.end,
                "new_tokens": s.label.end - s.label.start,
                "bytes": s.label.nbytes,
                "used": datetime.fromtimestamp(s.used, UTC).isoformat(timespec="seconds"),
            }
            for s in found.segments
        ],
        "faulty": [error.message for error in found.faulty],
    }


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    size = facts["bytes"] / 1e9
    yield f"{facts['directory']}: {len(facts['segments'])} segments, {size:.3f} GB"
    for s in facts["segments"]:
        yield (
            f"{s['used']}  model {s['model'][:12]}  {s['tokens']:>9,} tokens, {s['new_tokens']:,} its own,"
            f" {s['bytes'] / 1e6:,.1f} MB, {_ABOUT[s['kind']]}"
        )
    yield from (f"not usable: {message}" for message in facts["faulty"])
