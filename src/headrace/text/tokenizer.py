"""Text to token ids and back, over a Hugging Face `tokenizer.json`.

Owns the rule that control tokens come only from trusted text: what a user wrote is encoded as
ordinary text, whatever it spells. Knows nothing of models, templates or other files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers.models import Unigram

from headrace.errors import FileError, HeadraceError
from headrace.text import backend
from headrace.text.detokenizer import Detokenizer
from headrace.text.marks import Marks
from headrace.text.meter import Look
from headrace.text.pieces import byte_alphabet, piece_rule

_SURROGATE = re.compile("[\ud800-\udfff]")
PART = 1 << 16  # characters
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF  # how surrogateescape spells a byte that is not UTF-8

Check = Callable[[int], None]


class Tokenizer:
    """A vocabulary with its encoding and decoding rules. Safe to use from several threads.

    `bos` and `eos` are ids that the artifact's manifest states; without them `bos` is the token
    that the tokenizer itself puts in front of a text, if any. `source` returns its JSON.
    """

    def __init__(
        self,
        library: Library,
        source: Callable[[], str],
        *,
        bos: int | None = None,
        eos: Sequence[int] = (),
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._rule = piece_rule(library.decoder.__getstate__() if library.decoder else None)
        self._added = {a.id: a for a in backend.added_names(library)}
        self._before, self._after = _surroundings(library)
        self.bos = bos if bos is not None or not self._before else self._before[0]
        self.eos = tuple(eos)
        self.marks = Marks(list(self._added.values()))
        self._alphabet = {c: b for b, c in byte_alphabet().items()}
        self._bytes: dict[int, bytes] = {}
        self._source = source
        self._library = library
        self._prepare()

    def _prepare(self) -> None:
        library = self._library
        self._byte_ids = _byte_ids(library) if self._rule.byte_level else {}
        unknown = library.token_to_id(getattr(library.model, "unk_token", None) or "")
        self._control_ids = {i for i, a in self._added.items() if a.special} - {unknown}
        self._always_strict = isinstance(library.model, Unigram)
        self._plain = backend.plain(library, self.marks, self._byte_ids)

    @classmethod
    def from_file(
        cls, path: str | Path, *, bos: int | None = None, eos: Sequence[int] = ()
    ) -> Tokenizer:
        """Open a tokenizer.json.

        FileError when it is missing or is not one; UnsupportedError when its decoder is of a kind
        that headrace does not know.
        """
        file = Path(path)
        if not file.is_file():
            raise FileError(path, "tokenizer", "there is no such file")

        def load() -> Tokenizer:
            library = Library.from_file(str(path))
            return cls(library, lambda: file.read_text("utf-8"), bos=bos, eos=eos)

        return _loaded(path, load)

    @classmethod
    def from_json(cls, text: str, *, bos: int | None = None, eos: Sequence[int] = ()) -> Tokenizer:
        """As `from_file`, from the file's text."""
        return _loaded(
            "tokenizer.json",
            lambda: cls(Library.from_str(text), lambda: text, bos=bos, eos=eos),
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ids = self._library.get_vocab(with_added_tokens=True).values()
        return 1 + max((i for i in ids if i not in self._plain.mark_ids), default=-1)

    def encode(
        self,
        text: str | bytes,
        *,
        allow_special: bool = False,
        look: Look | None = None,
        check: Check | None = None,
    ) -> list[int]:
        """Ids of `text` alone: nothing is put in front or behind.

        The name of a control token in `text` is ordinary text unless `allow_special`. A byte that
        is not part of valid UTF-8 (in bytes, or escaped in a str by surrogateescape) becomes the
        token of that byte if the vocabulary is byte-level and has it, and U+FFFD otherwise.
        look, check: see `encode_marked`.
        """
        plain = text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else text
        marked = self.marks.mark(plain) if allow_special else plain
        return self.encode_marked(marked, look=look, check=check)

    def encode_prompt(
        self,
        text: str | bytes,
        *,
        allow_special: bool = True,
        look: Look | None = None,
        check: Check | None = None,
    ) -> list[int]:
        """Ids of a raw prompt, with what the tokenizer puts around a text, never a second time.

        look, check: see `encode_marked`.
        """
        ids = self.encode(text, allow_special=allow_special, look=look, check=check)
        before = [] if ids[: len(self._before)] == self._before else self._before
        return before + ids + self._after

    @property
    def adds_bos(self) -> bool:
        """Whether a raw prompt gets a token in front."""
        return bool(self._before)

    def encode_marked(
        self, text: str, *, look: Look | None = None, check: Check | None = None
    ) -> list[int]:
        """Ids of text whose control tokens are marks (see marks.py); any other text is ordinary.

        Either ends the work of a long text by what it raises. look: is called now and then. check: is given a number of
        tokens that there surely are, long before all are counted.
        """
        text = _SURROGATE.sub(self._surrogate, text)
        if len(text) > PART and (look is not None or check is not None):
            self._sound(text, look or (lambda: None), check or (lambda _: None))
        return self._encoded(text)

    def _sound(self, text: str, look: Look, check: Check) -> None:
        """Go through a long text in parts: nothing interrupts the library, and it may take a minute for what no model
        reads. A cut adds a few tokens to the hundreds of a part, so there are surely half as many as the parts have."""
        count = 0
        for at in range(0, len(text), PART):
            look()
            count += len(self._encoded(text[at : at + PART]))
            check(count // 2)
        look()

    def _encoded(self, text: str) -> list[int]:
        if self._always_strict:
            return self._strict.encode(text)
        found = self._plain.raw(text)
        if not self._control_ids.isdisjoint(found):  # ordinary text was cut into a control token
            return self._strict.encode(text)
        return self._plain.mapped(found)

    @cached_property
    def _strict(self) -> backend.Backend:
        return backend.strict(self._source(), self.marks, self._byte_ids)

    def _surrogate(self, match: re.Match[str]) -> str:
        code = ord(match[0])
        if _FIRST_BYTE <= code <= _LAST_BYTE and code - 0xDC00 in self._byte_ids:
            return self.marks.of_byte(code - 0xDC00)
        return "\ufffd"

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._find_bytes(token)
        return data

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].content.encode()
        known = 0 <= token < 2**32 and token not in self._plain.mark_ids
        piece = self._library.id_to_token(token) if known else None
        return b"" if piece is None else self._rule.decode(piece, self._alphabet)

    def is_special(self, token: int) -> bool:
        """Whether the id is a control token."""
        added = self._added.get(token)
        return added is not None and added.special

    @property
    def control_names(self) -> frozenset[str]:
        """How the control tokens are written."""
        return frozenset(a.content for a in self._added.values() if a.special)

    def _text_bytes(self, token: int) -> bytes:
        return b"" if self.is_special(token) else self.token_bytes(token)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD."""
        stream = self.stream(skip_special=skip_special)
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self, *, skip_special: bool = True, continues: bool = False) -> Detokenizer:
        """A detokenizer for ids as they come.

        `continues`: the ids go on from earlier text, so a leading space is part of the text.
        """
        source = self._text_bytes if skip_special else self.token_bytes
        return Detokenizer(source, "keep" if continues else self._rule.lead)


def _loaded(path: str | Path, load: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        return load()
    except HeadraceError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not of class Exception
        raise FileError(path, "tokenizer", str(error) or type(error).__name__) from None


def _surroundings(library: Library) -> tuple[list[int], list[int]]:
    """What the tokenizer's own post-processor puts before and after a text."""
    found = library.encode("a", add_special_tokens=True)
    mask = found.special_tokens_mask
    start = mask.index(0) if 0 in mask else len(mask)
    stop = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return found.ids[:start], found.ids[stop:]


def _byte_ids(library: Library) -> dict[int, int]:
    """The ids of single bytes that can be outside valid UTF-8, those that the vocabulary has."""
    found = {b: library.token_to_id(piece) for b, piece in byte_alphabet().items()}
    return {b: i for b, i in found.items() if i is not None and b >= 0x80}
