"""What a decode step says of each of its sequences. Frozen values; knows nothing of what computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.embed.errors import EmbedError


@dataclass(frozen=True)
class Token:
    """The next token. It is read by the next step, or by the next prefill, before anything else."""

    id: int
    retry: ClassVar[bool] = False

    @property
    def code(self) -> int:
        return self.id


@dataclass(frozen=True)
class MidToken:
    """The layer budget ended within a token: call again to go on. layers: that are done of it."""

    layers: int
    code: ClassVar[int] = -1
    retry: ClassVar[bool] = True


@dataclass(frozen=True)
class DeadEnd:
    """The schema allows no token here. The sequence is as it was: the same call says the same again.

    accepting: whether what was generated satisfies the schema. cause: in words.
    """

    accepting: bool
    cause: str
    code: ClassVar[int] = -2
    retry: ClassVar[bool] = True


@dataclass(frozen=True)
class Gone:
    """The sequence was released, before the step or during it. There is nothing to retry with."""

    code: ClassVar[int] = -3
    retry: ClassVar[bool] = False


@dataclass(frozen=True)
class Refused:
    """This sequence could not go on, the others did. Nothing of it was consumed; error: the cause."""

    error: EmbedError
    code: ClassVar[int] = -4
    retry: ClassVar[bool] = True


Outcome = Token | MidToken | DeadEnd | Gone | Refused
