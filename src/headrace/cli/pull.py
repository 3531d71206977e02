"""`headrace pull`: fetch a registered model and convert it."""

from __future__ import annotations

import sys

from headrace import locate
from headrace.cli import progress


def pull(name: str | None = None) -> int:
    """Download a model of the registry, check it against its pinned hash, and convert it.

    An interrupted download goes on where it stopped.

    Parameters
    ----------
    name
        The model's name, such as smollm2:135m. Without it, the names are listed.
    """
    if name is None:
        return _list()
    with progress.shown(bytes_counted=True) as report:
        path = locate.from_name(name, report, ask=False)
    print(path)
    print(f"{name} is ready: headrace run {name}", file=sys.stderr)
    return 0


def _list() -> int:
    from headrace.artifact.registry import entries

    for entry in entries().values():
        here = ", installed" if locate.installed(entry.name) else ""
        print(f"{entry.name}  {entry.about}, {entry.nbytes / 1e6:,.0f} MB{here}")
    return 0
