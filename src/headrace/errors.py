"""The one error tree. Each class knows its code, HTTP status, exit code and a hint.

Raised where the fact is known; rendered once by the CLI and once by the server. This module imports
nothing from headrace.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose. The message is one line."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.hint = hint

    @property
    def message(self) -> str:
        return str(self.args[0])


class InputError(HeadraceError):
    """Something that the user gave cannot be used: exit code 2."""

    code = "bad_input"
    http_status = 400
    exit_code = 2


class FileError(InputError):
    """A file is missing, damaged, hostile or not of the expected kind.

    `place` is where in the file (an offset, a key, a tensor), `cause` is what is wrong there.
    """

    code = "bad_file"

    def __init__(
        self, path: str | Path, place: str, cause: str, *, hint: str | None = None
    ) -> None:
        super().__init__(f"{path}: {place}: {cause}", hint=hint)
        self.path = Path(path)
        self.place = place
        self.cause = cause


class AdapterShapeError(FileError):
    """A tensor of an adapter does not fit its base; the message names it."""

    code = "adapter_shape"


class AdapterMismatchError(InputError):
    """An adapter was converted for another base; the message has both identities."""

    code = "adapter_mismatch"
    http_status = 409

    def __init__(self, path: str | Path, wanted: str, found: str) -> None:
        super().__init__(
            f"{path}: the adapter is for the model {wanted[:16]}, this is {found[:16]}",
            hint="convert the adapter for this model",
        )
        self.wanted = wanted
        self.found = found


class UnsupportedError(InputError):
    """A well-formed thing that headrace does not implement; names it and what is supported."""

    code = "unsupported"


class UnknownModelError(InputError):
    """A model name that the registry does not know and that is no path either."""

    code = "unknown_model"
    http_status = 404


class ContextError(InputError):
    """A prompt, or it and the `more` tokens that have to follow it, are longer than the context; the message says the
    numbers."""

    code = "context_overflow"

    def __init__(self, prompt_tokens: int, context_tokens: int, more: int = 0) -> None:
        needed = "" if prompt_tokens > context_tokens else f"; an answer needs {more} more"
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, the context holds {context_tokens}{needed}",
            hint="shorten the prompt, or use a model with a longer context",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class PromptSizeError(InputError):
    """A prompt is so long that its tokens need not be counted: no context of that many tokens holds it."""

    code = "context_overflow"

    def __init__(self, count: int, context_tokens: int, what: str = "characters") -> None:
        super().__init__(
            f"the prompt has {count:,} {what}, the context holds {context_tokens} tokens",
            hint="shorten the prompt, or use a model with a longer context",
        )
        self.context_tokens = context_tokens


class SettingError(InputError):
    """A setting, flag or environment variable with an unusable name or value."""

    code = "bad_setting"


class TemplateError(InputError):
    """A chat template that is invalid, raises, or exceeds its bounds."""

    code = "bad_template"


class GrammarError(InputError):
    """A schema, regular expression or grammar that cannot be followed exactly, or asks for too much.

    `place` is where in it, as far as it is known (a JSON pointer of a schema, a line of a grammar), `cause` what is
    wrong there, by the keyword's name where there is one.
    """

    code = "schema_unsupported"

    def __init__(self, kind: str, place: str, cause: str, *, hint: str | None = None) -> None:
        super().__init__(f"{kind}{place and ' at '}{place}: {cause}", hint=hint)
        self.kind = kind
        self.place = place
        self.cause = cause


class ConstraintError(HeadraceError):
    """A generation met a dead end of its grammar, or a limit of what following it may cost; its text ends there."""

    code = "constraint_failed"
    http_status = 422

    def __init__(self, cause: str, *, dead_end: bool = False) -> None:
        super().__init__(f"the answer cannot be continued within its grammar: {cause}")
        self.cause = cause
        self.dead_end = dead_end


class DiskFullError(HeadraceError):
    """The disk cannot hold what is about to be written; what was there before is untouched."""

    code = "disk_full"
    http_status = 507

    def __init__(
        self, path: str | Path, needed_bytes: int, free_bytes: int, cause: str | None = None
    ) -> None:
        """cause: what ran out, where it is not bytes."""
        room = f"needs {needed_bytes:,} bytes, {free_bytes:,} are free"
        super().__init__(f"{path}: {cause or room}")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class MemoryBudgetError(InputError):
    """A model, a window or a pool does not fit the memory; the message says both numbers."""

    code = "memory_budget"
    http_status = 507

    def __init__(
        self, message: str, needed_bytes: int, budget_bytes: int, *, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class DownloadError(HeadraceError):
    """A download failed or its bytes are not those that the registry pins."""

    code = "download_failed"
    http_status = 502


class KernelUnavailableError(InputError):
    """A kernel tier was forced that this machine or build does not have."""

    code = "kernel_unavailable"


class ExpertReadError(HeadraceError):
    """An expert's record could not be read; only the request that needed it ends."""

    code = "expert_read_failed"

    def __init__(self, layer: int, expert: int, cause: str = "its read failed") -> None:
        super().__init__(f"layer {layer}, expert {expert}: {cause}")
        self.layer = layer
        self.expert = expert


class ParallelForError(HeadraceError):
    """A host's parallel-for left out, repeated or invented a task; what it was to compute can be repeated."""

    code = "parallel_for_incomplete"


class CancelledError(HeadraceError):
    """The work was cancelled by its caller."""

    code = "cancelled"
    http_status = 499
    exit_code = 130
