"""A Hugging Face tokenizer in which control tokens can be reached through marks only.

Owns the two ways to get there: telling the library to leave control tokens' names alone (`plain`),
or, where ordinary text could still be cut into one, renaming them throughout (`strict`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from headrace.errors import InputError, UnsupportedError
from headrace.text.marks import AddedName, Marks

_LONG = 4096  # characters that take a while, in which other threads are to run

Json = dict[str, Any]


class Backend:
    """Encodes marked text. `mark_ids` maps the library's ids of marks to the vocabulary's ids."""

    def __init__(self, library: Library, mark_ids: Mapping[int, int]) -> None:
        self._library = library
        self.mark_ids = mark_ids

    def raw(self, text: str) -> list[int]:
        """Ids as the library numbers them. InputError when the library fails on the text."""
        try:
            if len(text) < _LONG:
                return list(self._library.encode(text, add_special_tokens=False).ids)
            # The library lets go of the interpreter for batches alone.
            return list(self._library.encode_batch([text], add_special_tokens=False)[0].ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are not of class Exception
            raise InputError(f"the tokenizer cannot encode this text: {error}") from None

    def mapped(self, ids: list[int]) -> list[int]:
        """The vocabulary's ids of the library's."""
        return [self.mark_ids.get(i, i) for i in ids]

    def encode(self, text: str) -> list[int]:
        return self.mapped(self.raw(text))


def added_names(library: Library) -> list[AddedName]:
    """The tokenizer's added vocabulary."""
    return [
        AddedName(i, t.content, t.special, t.single_word, t.normalized)
        for i, t in library.get_added_tokens_decoder().items()
    ]


def plain(library: Library, marks: Marks, byte_ids: Mapping[int, int]) -> Backend:
    """Marks become further added tokens; names of control tokens are no longer looked for.

    `byte_ids` are the ids of single bytes, for the marks of bytes outside valid UTF-8.
    """
    library.encode_special_tokens = True
    return Backend(library, _add_marks(library, marks, byte_ids))


def _add_marks(library: Library, marks: Marks, byte_ids: Mapping[int, int]) -> dict[int, int]:
    flags = library.get_added_tokens_decoder()
    wanted = {mark: i for i, mark in marks.by_id.items()}
    tokens = [_as_mark(mark, flags[i]) for mark, i in wanted.items()]
    wanted |= {marks.of_byte(b): i for b, i in byte_ids.items()}
    tokens += [_as_mark(marks.of_byte(b), None) for b in byte_ids]
    library.add_tokens(tokens)
    return _numbered(library, wanted)


def _as_mark(mark: str, like: AddedToken | None) -> AddedToken:
    if like is None:
        return AddedToken(mark, normalized=False)
    return AddedToken(mark, lstrip=like.lstrip, rstrip=like.rstrip, normalized=like.normalized)


def _numbered(library: Library, wanted: Mapping[str, int]) -> dict[int, int]:
    ids = {}
    for mark, target in wanted.items():
        number = library.token_to_id(mark)
        if number is None or library.model.id_to_token(number) is not None:
            # Numbered after the vocabulary's size, not its largest id: it would mean two tokens.
            raise UnsupportedError("the tokenizer's vocabulary has gaps between its ids")
        ids[number] = target
    return ids


def strict(source: str, marks: Marks, byte_ids: Mapping[int, int]) -> Backend:
    """A second tokenizer built from the same JSON, with every control token renamed to its mark.

    A merge that makes or uses a control token's name is left out, so no ordinary text becomes one.
    """
    data: Json = json.loads(source)
    names = {a["content"]: marks.mark(a["content"]) for a in data["added_tokens"] if a["special"]}
    for added in data["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    _rename(data["model"], names)
    data["post_processor"] = None
    library = Library.from_str(json.dumps(data, ensure_ascii=False))
    ids = {library.token_to_id(mark) or 0: i for i, mark in marks.by_id.items()}
    return Backend(library, ids | _add_byte_marks(library, marks, byte_ids))


def _add_byte_marks(library: Library, marks: Marks, byte_ids: Mapping[int, int]) -> dict[int, int]:
    library.add_tokens([_as_mark(marks.of_byte(b), None) for b in byte_ids])
    return _numbered(library, {marks.of_byte(b): i for b, i in byte_ids.items()})


def _rename(model: Json, names: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if not _touches(_pair(m), names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _touches(pair: list[str], names: Mapping[str, str]) -> bool:
    return "".join(pair) in names or any(p in names for p in pair)
