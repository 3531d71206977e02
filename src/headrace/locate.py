"""Where a model is: a name or a path to an artifact that is ready to open.

Owns the cache of converted files under the home folder and the question before a download. Opens no
model itself.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import config
from headrace.errors import FileError, InputError, UnknownModelError

if TYPE_CHECKING:
    from headrace.artifact.container import Artifact

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much

_PATH_LIKE = re.compile(r"[/\\]|\.gguf$|^\.")
_MANIFEST = "manifest.json"
_FIRST_FILE = "dense-00001.safetensors"  # only artifacts have it
_AGAIN = "convert or pull the model again"


def locate(model: str | Path, *, progress: Progress | None = None, ask: bool | None = None) -> Path:
    """The artifact directory of a registered name, an artifact, a GGUF file or a model directory.

    A file of another format is converted once into the cache. A named model that is not there is
    pulled after asking; `ask` False pulls at once, None asks only where somebody can answer. Raises
    InputError, FileError, UnknownModelError.
    """
    report = progress or (lambda what, done, total: None)
    path = Path(model).expanduser()
    if path.exists() or isinstance(model, Path) or _PATH_LIKE.search(str(model)):
        return _from_path(path, report)
    return from_name(str(model), report, ask)


def found(model: str | Path) -> Path | None:
    """The artifact directory of what `locate` takes, where it is ready; nothing is converted or pulled.

    Raises FileError, UnknownModelError for what is no model at all.
    """
    path = Path(model).expanduser()
    if not (path.exists() or isinstance(model, Path) or _PATH_LIKE.search(str(model))):
        return installed(str(model))
    if not path.exists():
        raise FileError(path, "open", "there is no such file or directory")
    ready = path if (path / _MANIFEST).is_file() else _converted(path)
    return ready if (ready / _MANIFEST).is_file() else None


def locate_adapter(path: str | Path, base: Artifact, *, progress: Progress | None = None) -> Path:
    """The folder of an adapter for `base`: an artifact, or a PEFT folder, which is converted once into the cache.

    Raises FileError, UnsupportedError, AdapterShapeError.
    """
    from headrace.artifact.adapter import is_adapter
    from headrace.artifact.adapter_convert import convert_adapter
    from headrace.artifact.peft import is_peft

    folder = Path(path).expanduser()
    if not folder.exists():
        raise FileError(folder, "open", "there is no such file or directory")
    if (folder / _MANIFEST).is_file() or is_adapter(folder):
        return folder
    if not is_peft(folder):
        raise FileError(folder, "open", "is neither an adapter's artifact nor a PEFT folder")
    target = config.load().home / "converted" / _cache_name(folder, base.identity)
    if not (target / _MANIFEST).is_file():
        if progress is not None:
            progress(f"convert {folder.name}", 0, 1)
        convert_adapter(folder, target, base)
        _forget_older(target)
    return target


def compute_settings(threads: int | None, kernels: str | None) -> tuple[int | None, str | None]:
    """Threads and kernel tier, the settings' where None is given."""
    settings = config.load()
    return (
        settings.threads if threads is None else threads,
        settings.kernels if kernels is None else kernels,
    )


def _from_path(path: Path, report: Progress) -> Path:
    if not path.exists():
        raise FileError(path, "open", "there is no such file or directory")
    if (path / _MANIFEST).is_file():
        return path
    if (path / _FIRST_FILE).exists():
        raise FileError(
            path, _MANIFEST, "is missing: this is an artifact that is not complete", hint=_AGAIN
        )
    from headrace.artifact.convert import convert

    target = _converted(path)
    if not (target / _MANIFEST).is_file():
        convert(
            path,
            target,
            progress=lambda step, done, total: report(f"{step} {path.name}", done, total),
        )
        _forget_older(target)
    return target


def _forget_older(target: Path) -> None:
    """Remove conversions, and what killed ones left, of the same path as it was before."""
    from headrace.artifact.unfinished import leftovers

    start = f"{target.name.rpartition('-')[0]}-"
    old = [path for path in target.parent.glob(f"{start}*") if path != target]
    old += [left.path for left in leftovers(target.parent) if left.target.startswith(start)]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def _converted(path: Path) -> Path:
    """Where the conversion of a file is kept."""
    return config.load().home / "converted" / _cache_name(path)


def _cache_name(path: Path, base: str = "") -> str:
    """A name for the conversion of a file as it is now: the stem, a hash of the path, a hash of the file's facts.

    base: the identity of the model that it is converted for, if for one.

    Another inode, size, time of writing or of change is another name.
    """
    resolved = path.resolve()
    files = sorted(resolved.iterdir()) if resolved.is_dir() else _split_files(resolved)
    stats = [(f, f.stat()) for f in files if f.is_file()]
    facts = "\n".join(
        f"{f}\0{s.st_dev}\0{s.st_ino}\0{s.st_size}\0{s.st_mtime_ns}\0{s.st_ctime_ns}"
        for f, s in stats
    )
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", resolved.stem)[:80].lstrip(".")
    return f"{stem}-{_digest(str(resolved) + base)}-{_digest(facts)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _split_files(path: Path) -> list[Path]:
    """A GGUF file with its siblings where it is one of several."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    return sorted(f for f in path.parent.iterdir() if f.name.startswith(match[1]))


def from_name(name: str, report: Progress, ask: bool | None) -> Path:
    """The artifact of a registered name, pulled if need be; `ask` as in `locate`."""
    from headrace.artifact.registry import lookup

    entry, home = lookup(name), config.load().home
    if (found := entry.installed(home)) is not None:
        return found
    if ask is not False:
        _ask(name, entry.nbytes, can_answer=sys.stdin.isatty() and sys.stderr.isatty())
    from headrace.artifact.pull import pull_entry  # the web is imported only where it is needed

    return pull_entry(entry, home, report)


def _ask(name: str, nbytes: int, *, can_answer: bool) -> None:
    hint = f"get it with: headrace pull {name}"
    if not can_answer:
        raise UnknownModelError(f"model {name!r} is not on this machine", hint=hint)
    print(
        f"{name} is not here yet: pull {nbytes / 1e6:,.0f} MB? [Y/n] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise InputError(f"model {name!r} was not pulled", hint=hint)


def installed(name: str) -> Path | None:
    """The artifact of a registered name if it is on this machine."""
    from headrace.artifact.registry import lookup

    return lookup(name).installed(config.load().home)
