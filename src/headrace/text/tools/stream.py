"""A model's text as reasoning, answer and calls, while it comes: one parser for every row of `formats`.

Tags are held back until they are whole and never told; however the text is cut, the pieces together are the same.
Each character is looked at a bounded number of times: what is kept unread between two pieces of text is a tag or a
name at most. What is no call although it is marked as one comes as `Malformed`, whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from headrace.text.tools import calls
from headrace.text.tools.calls import MAX_NAME, Body, Calls, Elements, Named, Objects
from headrace.text.tools.formats import (
    ARGS,
    CALL,
    CALL_ID,
    CHANNEL,
    CHANNEL_TAGS,
    CONSTRAIN,
    END,
    MESSAGE,
    NAMED_TAGS,
    RETURN,
    START,
    Format,
)
from headrace.text.tools.pieces import Malformed, Piece, Reasoning, Said
from headrace.text.tools.prose import Prose, Tags
from headrace.values import Tool

_SPACE = re.compile(r"\s*")
_TO = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_CLOSERS = (END, CALL, RETURN, START, CHANNEL)
INCOMPLETE = "the call is incomplete"

Step = Callable[[str, int], int]


class StreamParser:
    """Reads one answer. `push` its text, `control` its control tokens, `finish` once.

    tools: those that may be called; without any, tags of calls are text. reasoning_open: the prompt ends within
    reasoning. json_answer: the grammar makes an answer that is no call JSON, whose strings may spell anything.
    """

    def __init__(
        self,
        format: Format,
        tools: Iterable[Tool] = (),
        *,
        reasoning_open: bool = False,
        json_answer: bool = False,
    ) -> None:
        self._format = format
        self._calls = Calls(tools)
        self._channels = format.shape == "channels"
        self._out: list[Piece] = []
        self._buffer = ""
        self._prose = Prose(self._out)
        self._body: Body | None = None
        self._raw: list[str] = []  # of what may turn out to be no call
        self._doubtful = False  # it may be text: nothing but its shape says it is a call
        self._cause = ""
        self._name: list[str] = []  # of a tool, or a message's header
        self._size = 0
        self._in_id = False
        self._set_tags(json_answer)
        self._step: Step = self._header if self._channels else self._fresh
        if reasoning_open:
            self._reason()

    def _set_tags(self, json_answer: bool) -> None:
        form = self._format
        think = form.think or ()
        offered = bool(self._calls.tools)
        opening = [form.open] if offered and form.open else []
        if offered and form.shape == "xml":
            opening += [f"{calls.FUNCTION}{name}>" for name in self._calls.tools]
        own = list(CHANNEL_TAGS) if self._channels else []
        closing = (form.close,) if offered and form.close else ()
        closers = _CLOSERS if self._channels else closing
        self._closers = frozenset(closers)
        self._answer_tags = Tags([] if json_answer else [*opening, *closing, *own], form)
        self._fresh_tags = Tags([*opening, *think, *closers, *own], form)
        self._reason_tags = Tags([*think[1:], *own], form)
        self._closing_tags = Tags([*closers, *opening], form)
        self._skip_tags = Tags(closers or opening, form)
        self._name_tags = Tags([*opening, ARGS, CALL_ID], form)
        self._header_tags = Tags(CHANNEL_TAGS, form)

    @property
    def reasons(self) -> bool:
        """Whether what comes next is reasoning, as far as can be told."""
        return self._step == self._think

    @property
    def held(self) -> str:
        """Whitespace at the end of the answer so far, not told yet: it is no part of it if a call follows."""
        return self._prose.held

    def push(self, text: str) -> list[Piece]:
        """The pieces that some more text completes."""
        self._buffer += text
        self._run()
        return self._told()

    def control(self, name: str) -> list[Piece]:
        """A control token. One that means nothing where it stands is left out."""
        if name in self._format.controls and self._heeds(name):
            self._settle()
            self._tag(name)
        return self._told()

    def _heeds(self, name: str) -> bool:
        if self._channels:
            return name != CONSTRAIN or self._step == self._header
        if name in (self._format.think or ()):
            return self._step in (self._think, self._fresh, self._say)
        if name in NAMED_TAGS:
            return self._step == self._naming
        return bool(self._calls.tools)

    def finish(self, cut: bool) -> list[Piece]:
        """The answer's end. cut: by a limit; then what may have been the beginning of a tag or a call is left out."""
        if cut and self._step != self._skip and not self._doubtful:
            self._buffer = ""
        else:
            self._settle()
            if self._step not in (self._fresh, self._say, self._think):
                self._unfinished()
        self._prose.flush()
        return self._told()

    def _told(self) -> list[Piece]:
        out = list(self._out)
        self._out.clear()
        return out

    def _run(self) -> None:
        at, text = 0, self._buffer
        while at < len(text):
            before, step = at, self._step
            at = self._step(text, at)
            if at == before and self._step == step:
                break
        self._buffer = text[at:]

    def _settle(self) -> None:
        """Nothing goes on behind what is held: it is no tag."""
        self._run()
        text, self._buffer = self._buffer, ""
        if not text:
            return
        if self._step in (self._fresh, self._say):
            self._step = self._say
            self._prose.say(text)
        elif self._step == self._think:
            self._prose.think(text)
        elif self._step == self._closing:
            self._fail(f"{text[0]!r} follows the call")
            self._raw.append(text)
        else:
            self._name.append(text)
            self._raw.append(text)

    # Text

    def _fresh(self, text: str, at: int) -> int:
        """Nothing was said yet, or nothing since the last call or reasoning."""
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        while self._format.shape == "bare" and self._calls.count and text[start : start + 1] == ";":
            start = _SPACE.match(text, start + 1).end()  # type: ignore[union-attr]
            at = start
        self._prose.say(text[at:start])
        if start == len(text):
            return start
        tag = self._fresh_tags.at(text, start)
        if tag in self._closers or tag in (self._format.think or ()):
            return self._aside(tag, start)
        if tag:
            return self._tag(tag, start)
        if self._fresh_tags.may_begin(text, start):
            return start
        bare = self._format.shape == "bare" and self._calls.tools and text[start] == "{"
        if bare:
            self._begin(Objects(self._calls, eager=True, doubtful=True), "", doubtful=True)
        else:
            self._step = self._say
        return start

    def _aside(self, tag: str, at: int) -> int:
        """Reasoning that begins, or a tag that closes nothing."""
        if self._format.think and tag == self._format.think[0]:
            self._reason()
        return at + len(tag)

    def _say(self, text: str, at: int) -> int:
        stop, tag = self._answer_tags.find(text, at)
        self._prose.say(text[at:stop])
        return self._tag(tag, stop) if tag else stop

    def _think(self, text: str, at: int) -> int:
        stop, tag = self._reason_tags.find(text, at)
        self._prose.think(text[at:stop])
        return self._tag(tag, stop) if tag else stop

    def _reason(self) -> None:
        self._prose.turn()
        self._step = self._think

    # Tags

    def _tag(self, tag: str, at: int = 0) -> int:
        """A tag, as text at a place of it or as a control token; returns where the text goes on."""
        if self._channels:
            self._channel_tag(tag)
        elif tag == self._format.open or tag.startswith(calls.FUNCTION):
            self._open(tag)
            if tag.startswith(calls.FUNCTION):
                return at
        elif tag in self._closers:
            self._close(tag)
        elif self._step == self._naming:
            self._named(tag)
        elif self._format.think and self._step in (self._think, self._fresh, self._say):
            if tag == self._format.think[0]:
                self._reason()
            elif tag == self._format.think[1] and self._step == self._think:
                self._prose.turn()
                self._step = self._fresh
        return at + len(tag)

    def _open(self, tag: str) -> None:
        if not self._calls.tools:
            return
        self._end_body(tag)
        shape = self._format.shape
        if shape in ("list", "named"):
            self._start_raw(tag)
            self._name, self._size, self._in_id = [], 0, False
            self._step = self._naming
        elif tag.startswith(calls.FUNCTION):
            self._begin(self._elements(), "")
        elif shape == "bare":
            self._begin(Objects(self._calls, eager=True), tag)
        else:
            self._start_raw(tag)
            self._step = self._choose

    def _end_body(self, tag: str) -> None:
        """A call begins: what was in hand ends without a tag of its own."""
        if self._step == self._skip:
            self._tell_malformed()
        elif self._body is not None and self._body.enough:
            self._done()
        elif self._step in (self._call, self._closing, self._naming, self._choose):
            self._fail(INCOMPLETE)
            self._tell_malformed()
        self._prose.turn()

    def _close(self, tag: str) -> None:
        if self._step == self._skip:
            self._raw.append(tag)
            self._tell_malformed()
        elif self._body is not None and self._body.enough:
            self._done()
        elif self._step in (self._call, self._choose, self._closing):
            self._fail(INCOMPLETE)
            self._raw.append(tag)
            self._tell_malformed()

    # Calls

    def _start_raw(self, tag: str) -> None:
        self._raw = [tag]
        self._doubtful = False

    def _begin(self, body: Body, tag: str, *, doubtful: bool = False) -> None:
        if not doubtful:
            self._prose.turn()
        self._raw = [tag] if tag else []
        self._take_up(body)
        self._doubtful = doubtful

    def _take_up(self, body: Body) -> None:
        self._body = body
        self._step = self._call
        self._tell(body)
        if body.error:
            self._fail(body.error)

    def _choose(self, text: str, at: int) -> int:
        """Behind an opening tag: elements, or objects, which models of elements write at times, too."""
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        self._raw.append(text[at:start])
        if start < len(text):
            element = text[start] == "<" and self._format.shape == "xml"
            self._take_up(self._elements() if element else Objects(self._calls, eager=False))
        return start

    def _elements(self) -> Elements:
        """Where the tag behind it is a control token, no text of it can spell its end."""
        closed_by_text = not self._format.is_control(self._format.close)
        return Elements(self._calls, self._format.close if closed_by_text else "")

    def _call(self, text: str, at: int) -> int:
        body = self._body
        assert body is not None
        stop = body.feed(text, at)
        self._raw.append(text[at:stop])
        if self._doubtful and body.begun:
            self._doubtful = False
            self._prose.turn()
        self._tell(body)
        if body.error:
            return self._failed(body.error, stop)
        if body.over:
            self._step = self._closing
            if not self._closers or self._raw[0].startswith(calls.FUNCTION):
                self._done()
        return stop

    def _tell(self, body: Body) -> None:
        self._out += body.pieces
        body.pieces = []

    def _failed(self, cause: str, stop: int) -> int:
        if self._doubtful:
            self._text_after_all()
            self._step = self._say
        else:
            self._fail(cause)
        return stop

    def _text_after_all(self) -> None:
        self._doubtful, self._body = False, None
        raw, self._raw = "".join(self._raw), []
        self._prose.say(raw)

    def _done(self) -> None:
        assert self._body is not None
        self._out += self._body.closed()
        self._body, self._raw = None, []
        self._step = self._between if self._channels else self._fresh

    def _closing(self, text: str, at: int) -> int:
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        self._raw.append(text[at:start])
        if start == len(text):
            return start
        tag = self._closing_tags.at(text, start)
        if tag:
            return self._tag(tag, start)
        if not self._closing_tags.may_begin(text, start):
            self._fail(f"{text[start]!r} follows the call")
        return start

    def _fail(self, cause: str) -> None:
        self._body, self._cause = None, cause
        self._step = self._skip

    def _skip(self, text: str, at: int) -> int:
        stop, tag = self._skip_tags.find(text, at)
        self._raw.append(text[at:stop])
        return self._tag(tag, stop) if tag else stop

    def _tell_malformed(self) -> None:
        self._out.append(Malformed(self._cause, "".join(self._raw)))
        self._body, self._raw = None, []
        self._step = self._between if self._channels else self._fresh
        self._prose.turn()

    def _unfinished(self) -> None:
        """The text ended in the middle of something, or where only a closing tag is missing."""
        if self._doubtful:
            self._text_after_all()
        elif self._step == self._header:
            self._headless()
        elif self._body is not None and self._body.enough:
            self._done()
        elif self._step != self._between:
            if self._step != self._skip:
                self._fail(INCOMPLETE)
            self._tell_malformed()

    # Names behind a tag

    def _naming(self, text: str, at: int) -> int:
        if not self._size and not self._in_id:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if text[at : at + 1] in ("[", "{"):
                self._take_up(Objects(self._calls, eager=True))
                return at
        stop, tag = self._name_tags.find(text, at)
        brace = -1 if self._in_id else text.find("{", at, stop)
        if brace >= 0:
            stop, tag = brace, ""
        stop = min(stop, at + MAX_NAME + 1 - self._size)
        self._size += stop - at
        self._raw.append(text[at:stop])
        if not self._in_id:
            self._name.append(text[at:stop])
        if self._size > MAX_NAME:
            self._fail(f"a name of more than {MAX_NAME} characters")
        elif tag:
            return self._tag(tag, stop)
        elif brace >= 0:
            self._take_up(Named(self._calls, "".join(self._name).strip()))
        return stop

    def _named(self, tag: str) -> None:
        self._raw.append(tag)
        if tag == ARGS:
            self._take_up(Named(self._calls, "".join(self._name).strip()))
        elif tag == CALL_ID:
            self._in_id = True

    # Channels

    def _header(self, text: str, at: int) -> int:
        stop, tag = self._header_tags.find(text, at)
        stop = min(stop, at + MAX_NAME + 1 - self._size)
        self._name.append(text[at:stop])
        self._size += stop - at
        if self._size > MAX_NAME:
            self._headless()
        elif tag:
            return self._tag(tag, stop)
        return stop

    def _headless(self) -> None:
        """What came as a header is none: text without one, or a header whose message never came."""
        text = "".join(self._name)
        bare = "".join(part for part in self._name if part != CONSTRAIN)
        self._name, self._size = [], 0
        self._step = self._say
        if CHANNEL in text or START in text:
            self._out.append(Malformed("a message has no text", text))
        else:
            self._prose.say(bare)

    def _between(self, text: str, at: int) -> int:
        """Behind a message, where another one begins."""
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if start == len(text):
            return start
        tag = self._header_tags.at(text, start)
        if tag:
            return self._tag(tag, start)
        if not self._header_tags.may_begin(text, start):
            self._prose.turn()
            self._step = self._say
        return start

    def _channel_tag(self, tag: str) -> None:
        if self._step == self._header and tag in (CHANNEL, CONSTRAIN):
            self._name.append(tag)
        elif self._step == self._header and tag == MESSAGE:
            self._message("".join(self._name))
        elif tag in _CLOSERS:
            if self._step in (self._call, self._closing, self._skip):
                self._close(tag)
            elif self._step == self._header and "".join(self._name).strip():
                self._headless()
            self._prose.turn()
            self._name, self._size = [tag] if tag in (START, CHANNEL) else [], 0
            self._step = self._header if self._name else self._between

    def _message(self, header: str) -> None:
        self._name, self._size = [], 0
        to, channel = _TO.search(header), _CHANNEL.search(header)
        name = to[1].removeprefix("functions.") if to else "assistant"
        self._prose.turn()
        if name not in ("assistant", "user", "all"):
            self._begin(Named(self._calls, name), header + MESSAGE)
        elif channel and channel[1] == "analysis":
            self._prose.joint(Reasoning)
            self._step = self._think
        else:
            self._prose.joint(Said)
            self._step = self._say
