"""Which prompts begin with a system message, and where it ends: what other conversations begin with too."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from headrace.engine.pages import PAGE_TOKENS
from headrace.errors import TemplateError
from headrace.text.conversation import Messages, Tools
from headrace.text.meter import Look
from headrace.text.template import ChatTemplate, encode_chat
from headrace.text.tokenizer import Tokenizer
from headrace.values import Message

MIN_TOKENS = PAGE_TOKENS  # of a head that is worth to be kept for others
_MOST_HEADS = 16
_PROBES = ("0", "a")  # what a user may begin with


class Heads:
    """The latest system messages of a model's conversations, as token ids."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._lock = threading.Lock()
        self._known: dict[str, list[int]] = {}  # by their text and tools, the latest last

    def note(
        self,
        messages: Messages,
        ids: Sequence[int],
        tools: Tools | None = None,
        variables: Mapping[str, object] | None = None,
        look: Look | None = None,
    ) -> None:
        """A conversation, and what the model reads for it; tools, variables, look: as its template was given them."""
        system = _system(messages[0])
        if system is None or self._template is None or len(ids) < MIN_TOKENS:
            return
        key = repr((system, tools, variables))
        head = self._known.get(key) or self._found(
            self._template, messages[0], ids, tools, variables, look
        )
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = head
            while len(self._known) > _MOST_HEADS:
                del self._known[next(iter(self._known))]

    def _found(
        self,
        template: ChatTemplate,
        system: Message | Mapping[str, object],
        ids: Sequence[int],
        tools: Tools | None,
        variables: Mapping[str, object] | None,
        look: Look | None,
    ) -> list[int]:
        """The tokens that every conversation with this system message begins with."""
        head = list(ids)
        for probe in _PROBES:
            try:
                other = encode_chat(
                    self._tokenizer,
                    template,
                    [system, Message("user", probe)],
                    tools=tools,
                    extra=variables,
                    look=look,
                )
            except TemplateError:  # it wants something else after a system message
                return []
            head = head[: _common(head, other)]
        return head

    def length(self, ids: Sequence[int]) -> int:
        """How many of a prompt's tokens are a system message; 0 for none and for a short one."""
        with self._lock:
            heads = list(self._known.values())
        longest = max((len(head) for head in heads if list(ids[: len(head)]) == head), default=0)
        return longest if longest >= MIN_TOKENS else 0


def _system(message: Message | Mapping[str, object]) -> str | None:
    """The text of a system message."""
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
    else:
        role, content = message.role, message.content
    return content if role == "system" and isinstance(content, str) else None


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))
