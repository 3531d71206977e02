"""GGUF vocabularies as `tokenizer.json`, so that one tokenizer serves every source.

Owns the three models that GGUF names (gpt2: byte-level BPE; llama: SentencePiece BPE; t5: unigram)
and their normalisation. Knows nothing of files or of encoding.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UnsupportedError
from headrace.text import charsmap
from headrace.text.gguf_metadata import MAX_MERGES, Entry, Kind, Metadata
from headrace.text.pieces import SPACE
from headrace.text.pretokenizers import Json, pre_tokenizer

_END_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
              "<|end_of_text|>", "</s>")  # fmt: skip
_BLANKS = r"\A +| +\z"
_MAX_CHARSMAP = 1 << 24  # bytes


@dataclass(frozen=True)
class SpecialIds:
    """The ids of a vocabulary's control tokens. `eos` are all that end a turn or a text."""

    bos: int | None
    eos: tuple[int, ...]
    add_bos: bool


def build_tokenizer_json(metadata: Mapping[str, object], path: str | Path = "GGUF metadata") -> str:
    """The text of a tokenizer.json that encodes as the vocabulary in `metadata` does.

    UnsupportedError for a model or pre-tokenizer that headrace does not know; FileError, naming
    `path` and the key, for metadata that is not a vocabulary.
    """
    source = Metadata(metadata, path)
    build = _builder(source)
    entries = source.entries()
    parts = build(source, entries)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(e) for e in entries if _is_added(e)],
        "post_processor": _post_processor(source, entries),
        **parts,
    }
    return json.dumps(whole, ensure_ascii=False)


def special_ids(metadata: Mapping[str, object], path: str | Path = "GGUF metadata") -> SpecialIds:
    """The ids that end and begin a text, and whether the tokenizer adds the first itself."""
    source = Metadata(metadata, path)
    _builder(source)
    entries = source.entries()
    count = len(entries)
    named = [source.token_id(f"{k}_token_id", count) for k in ("eos", "eot", "eom")]
    ends = [e.id for e in entries if e.kind == Kind.CONTROL and e.text in _END_NAMES]
    eos = dict.fromkeys([i for i in named if i is not None] + ends)
    return SpecialIds(source.token_id("bos_token_id", count), tuple(eos), _adds_bos(source))


_Builder = Callable[[Metadata, list[Entry]], Json]


def _builder(source: Metadata) -> _Builder:
    builders: dict[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    name = source.text("model")
    if name not in builders:
        known = ", ".join(builders)
        raise UnsupportedError(f"tokenizer.ggml.model {name!r} is not supported; only: {known}")
    return builders[name]


def _is_added(entry: Entry) -> bool:
    return entry.kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED) and entry.text != ""


def _added(entry: Entry) -> Json:
    return {
        "id": entry.id,
        "content": entry.text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": entry.kind != Kind.USER_DEFINED,
    }


def _name(entry: Entry) -> str:
    """The entry's key in the vocabulary. One with a space before it is met by no text: spaces are
    spelled otherwise in every model."""
    return f" {entry.id} {entry.text}" if entry.kind == Kind.UNUSED else entry.text


def _adds_bos(source: Metadata) -> bool:
    model = source.text("model")
    default = model == "llama" or (model == "gpt2" and pre_tokenizer(source.text("pre")).adds_bos)
    return source.flag("add_bos_token", default)


def _post_processor(source: Metadata, entries: list[Entry]) -> Json | None:
    wanted = {"bos": _adds_bos(source), "eos": source.flag("add_eos_token", default=False)}
    found = {k: source.token_id(f"{k}_token_id", len(entries)) for k, on in wanted.items() if on}
    ids = {k: i for k, i in found.items() if i is not None}
    if not ids:
        return None
    text: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    marks = {k: [{"SpecialToken": {"id": entries[i].text, "type_id": 0}}] for k, i in ids.items()}
    single = [*marks.get("bos", []), *text, *marks.get("eos", [])]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            entries[i].text: {"id": entries[i].text, "ids": [i], "tokens": [entries[i].text]}
            for i in ids.values()
        },
    }


def _byte_level(source: Metadata, entries: list[Entry]) -> Json:
    rule = pre_tokenizer(source.text("pre"))
    return {
        "normalizer": rule.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.steps)},
        "decoder": rule.steps[-1],
        "model": _bpe(
            entries, _merges(source, entries), unknown=None, ignore_merges=rule.whole_words
        ),
    }


def _bpe(
    entries: list[Entry], merges: list[list[str]], *, unknown: str | None, ignore_merges: bool
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": any(e.kind == Kind.BYTE for e in entries),
        "ignore_merges": ignore_merges,
        "vocab": {_name(e): e.id for e in entries},
        "merges": merges,
    }


def _merges(source: Metadata, entries: list[Entry]) -> list[list[str]]:
    known = {e.text for e in entries if e.kind != Kind.UNUSED}
    merges = []
    for index, text in enumerate(source.strings("merges", MAX_MERGES)):
        head, gap, tail = text.partition(" ")
        pair = [head, tail]
        if not gap or not all(pair) or " " in tail:
            raise source.error("merges", f"item {index} is {text!r:.60}, not two tokens")
        if not known.issuperset((*pair, "".join(pair))):
            raise source.error("merges", f"item {index} is {text!r:.60}: no such token")
        merges.append(pair)
    return merges


def _sentencepiece(source: Metadata, entries: list[Entry]) -> Json:
    scores = source.scores(len(entries))
    unknown = next((e.text for e in entries if e.kind == Kind.UNKNOWN), None)
    return {
        **_spaced(source),
        "model": _bpe(entries, _scored(entries, scores), unknown=unknown, ignore_merges=False),
    }


def _scored(entries: list[Entry], scores: list[float]) -> list[list[str]]:
    """SentencePiece merges the pair whose union scores best: all cuts of all pieces, in order."""
    score = {e.text: scores[e.id] for e in entries if e.kind == Kind.NORMAL}
    cuts = []
    for piece, value in score.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in score and right in score:
                cuts.append((-value, -len(left), [left, right]))
    return [pair for *_, pair in sorted(cuts, key=lambda cut: cut[:2])]


def _unigram(source: Metadata, entries: list[Entry]) -> Json:
    scores = _lowered(entries, source.scores(len(entries)))
    unknown = next((e.id for e in entries if e.kind == Kind.UNKNOWN), None)
    return {
        **_spaced(source, collapse=True),
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[_name(e), scores[e.id]] for e in entries],
            "byte_fallback": any(e.kind == Kind.BYTE for e in entries),
        },
    }


def _lowered(entries: list[Entry], scores: list[float]) -> list[float]:
    """Scores at which no text is cut into what is not an ordinary piece, even if it spells one."""
    ordinary = [s for e, s in zip(entries, scores, strict=True) if e.kind == Kind.NORMAL]
    lowest = min(ordinary, default=0.0)
    below = {Kind.BYTE: 7 * min(lowest, -1.0)}  # six characters at the lowest score are better
    return [below.get(e.kind, max(s, lowest)) for e, s in zip(entries, scores, strict=True)]


def _spaced(source: Metadata, *, collapse: bool = False) -> Json:
    """Normaliser and decoder of SentencePiece: spaces are visible, one stands before the text."""
    prefix = source.flag("add_space_prefix", default=True)
    steps: list[Json] = []
    if source.has("precompiled_charsmap"):
        steps += _charsmap(source)
    if source.flag("remove_extra_whitespaces", default=collapse):
        steps += [_replace({"Regex": _BLANKS}, ""), _replace({"Regex": " {2,}"}, " ")]
    steps += [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    steps += [_replace({"String": " "}, SPACE)]
    decoders: list[Json] = [
        _replace({"String": SPACE}, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _charsmap(source: Metadata) -> list[Json]:
    found = source.items("precompiled_charsmap", _MAX_CHARSMAP)
    try:
        data = bytes(v % 256 for v in found)
    except TypeError:
        raise source.error("precompiled_charsmap", "it holds what is not a byte") from None
    if not data:
        return []
    cause = charsmap.fault(data)
    if cause:
        raise source.error("precompiled_charsmap", cause)
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}]


def _replace(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}
