"""The command line: its commands by name, and the one place where errors become text and exit codes.

A command's module is imported when the command is called, so that starting costs little.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

import cyclopts

from headrace.cli import failure
from headrace.errors import CancelledError, HeadraceError, SettingError
from headrace.signals import raise_on_interrupt

USAGE = 2

_PATH_ERRORS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG,
}  # fmt: skip

COMMANDS = (
    "run", "serve", "stop", "pull", "convert", "inspect", "doctor", "context-check", "prefix-cache", "fit-forecast",
    "schema", "bench", "selfcheck",
)  # fmt: skip


def make_app() -> cyclopts.App:
    """The application; its commands are still unloaded."""
    app = cyclopts.App(
        name="headrace",
        help="Exact inference of language models: the same tokens on every machine.",
        version=_version,
        help_format="plaintext",
    )
    for name in COMMANDS:
        module = name.replace("-", "_")
        app.command(f"headrace.cli.{module}:{module}", name=name)
    return app


def _version() -> str:
    import headrace

    return f"headrace {headrace.__version__}"


def execute(arguments: Sequence[str]) -> int:
    """Run a command line; the exit code."""
    warnings.showwarning = _show_warning
    _use_utf8()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for as long as the process)
    if sys.stdout is None:
        return _fail("standard output is closed", None, 1)
    try:
        return _flushed(_guarded(lambda: _call(arguments), json=_wants_json(arguments)))
    except BrokenPipeError:  # who read our output went away: not an error of ours
        return 0
    except OSError:  # standard error itself cannot be written
        return 1
    finally:
        _abandon_unwritable()


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether a program reads what the command prints, also where its flags cannot be read."""
    return arguments[:1] != ["run"] and "--json" in arguments


def _guarded(act: Callable[[], int], *, json: bool) -> int:
    try:
        return act()
    except HeadraceError as error:
        if json:
            failure.tell_json(error.code, error.message, error.hint)
        return _fail(error.message, error.hint, error.exit_code)
    except cyclopts.CycloptsError as error:
        hint = "headrace --help lists commands and flags"
        if json:
            failure.tell_json(SettingError.code, str(error), hint)
        return _fail(str(error), hint, USAGE)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # leaves the line with the ^C
        return CancelledError.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(_os_cause(error), None, USAGE if _is_of_a_path(error) else 1)
    except MemoryError:
        return _fail("out of memory", "a smaller --max-context takes less", 1)


def _flushed(code: int) -> int:
    """The code, once all output is written; another where it cannot be."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        return code or _fail(f"standard output: {_os_cause(error)}", None, 1)
    return code


def _call(arguments: Sequence[str]) -> int:
    app = make_app()
    if not arguments or arguments[0] in app.help_flags:
        for name in COMMANDS:
            app[name]  # loads it: the list shows what each module says of itself
    command, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    raise_on_interrupt()
    result = command(*bound.args, **bound.kwargs)
    return result if isinstance(result, int) else 0


def _is_of_a_path(error: OSError) -> bool:
    """Whether the place that was given is at fault: it cannot be found, read or written."""
    return error.filename is not None and error.errno in _PATH_ERRORS


def _os_cause(error: OSError) -> str:
    name = f"{error.filename}: " if error.filename is not None else ""
    return f"{name}{error.strerror or error}"


def _fail(message: str, hint: str | None, code: int) -> int:
    failure.tell(message, hint)
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    failure.print_safe(f"warning: {' '.join(str(message).split())}", sys.stderr)


def _use_utf8() -> None:
    """Output is UTF-8 whatever the locale; what it cannot hold is shown escaped, rather than ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")


def _abandon_unwritable() -> None:
    """So that the interpreter's last flush meets no closed pipe and no full disk."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
