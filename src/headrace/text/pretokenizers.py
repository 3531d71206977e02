"""How byte-pair vocabularies of GGUF cut text before merging, by the name the file gives.

A table: one row a published tokenizer, as JSON of the `tokenizers` library. Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import UnsupportedError

Json = dict[str, object]


@dataclass(frozen=True)
class PreTokenizer:
    """`adds_bos` and `whole_words` are what the tokenizer does when the file does not say.

    `whole_words`: a piece of text that is itself in the vocabulary is taken as it is, unmerged.
    """

    steps: tuple[Json, ...]
    normalizer: Json | None = None
    whole_words: bool = False
    adds_bos: bool = False


def _byte_level(use_regex: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(digits: str) -> Json:
    """The cl100k pattern with runs of digits cut as `digits` says."""
    pattern = "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_GPT2 = PreTokenizer((_byte_level(use_regex=True),))
_SMOLLM = PreTokenizer(
    ({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)),
)
_QWEN2 = PreTokenizer(
    (_split(r"\p{N}"), _byte_level(use_regex=False)),
    normalizer={"type": "NFC"},
)
_LLAMA3 = PreTokenizer(
    (_split(r"\p{N}{1,3}"), _byte_level(use_regex=False)),
    whole_words=True,
    adds_bos=True,
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of that name. UnsupportedError names it and what there is."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {known}")
    return found
