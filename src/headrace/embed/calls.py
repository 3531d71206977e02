"""What a running call uses: sequences and a workspace, which are then busy, and a mixture's experts, in turns.

An interrupt may end a call at any moment, before its `finally`, too. So what is in use names the call by a weak
reference: a call that is over, or that nothing knows any more, uses nothing.
"""

from __future__ import annotations

import threading
import weakref

from headrace.embed.errors import BusyError

POLL_SECONDS = 0.05  # how often who waits looks for a call that never said that it was over


class Call:
    """One call of a caller's. hooked: its passes call a hook, which may wait for any other thread."""

    def __init__(self, *, hooked: bool = False) -> None:
        self.hooked = hooked
        self.thread = threading.get_ident()
        self.over = False


class User:
    """Which call uses a thing. Not locked: whoever asks holds the thing's lock."""

    def __init__(self) -> None:
        self._call: weakref.ref[Call] | None = None

    @property
    def call(self) -> Call | None:
        """The call that uses it; None where none does."""
        call = None if self._call is None else self._call()
        return None if call is None or call.over else call

    def become(self, call: Call) -> None:
        self._call = weakref.ref(call)

    def leave(self, call: Call) -> None:
        """The call uses it no longer, if it did."""
        if self._call is not None and self._call() is call:
            self._call = None


class PassLock:
    """Turns at what passes share. A call whose passes have a hook, or that is further down this very thread's stack,
    is not waited for: what it waits for may be the one that would wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._user = User()

    def begin(self, call: Call) -> bool:
        """Wait until it is the call's turn; whether it was not already. Raises BusyError."""
        with self._changed:
            while (user := self._user.call) is not None and user is not call:
                if user.hooked or user.thread == call.thread:
                    raise BusyError("a pass with a hook uses the model's experts; call again later")
                self._changed.wait(POLL_SECONDS)
            self._user.become(call)
            return user is None

    def end(self, call: Call) -> None:
        with self._changed:
            self._user.leave(call)
            self._changed.notify_all()
