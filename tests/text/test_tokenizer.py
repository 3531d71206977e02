"""Encoding and decoding equal the original's; control tokens are never made of user text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_corpus import CORPUS, INVALID, LOOKALIKES
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from headrace.errors import FileError, UnsupportedError
from headrace.text.tokenizer import PART, Tokenizer

Pair = tuple[Tokenizer, Library]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]


def byte_level(**options: object) -> Library:
    """A small byte-level vocabulary with all bytes, trained on the corpus."""
    library = Library(models.BPE(**options))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


@pytest.fixture(scope="module")
def library() -> Library:
    return byte_level()


@pytest.fixture(scope="module")
def tokenizer(library: Library) -> Tokenizer:
    return Tokenizer.from_json(library.to_str())


def original(library: Library, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def real(shared_models: Path) -> Pair:
    """A real tokenizer.json, opened by headrace and by the library that it was written with."""
    path = shared_models / "smolmoe" / "tokenizer.json"
    if not path.is_file():
        pytest.skip("smolmoe/tokenizer.json is not among the shared models")
    return Tokenizer.from_file(path), Library.from_file(str(path))


@pytest.mark.parametrize("text", CORPUS + LOOKALIKES)
def test_real_vocabulary_encodes_and_decodes_as_the_original(real: Pair, text: str) -> None:
    ours, theirs = real
    ids = original(theirs, text)
    assert ours.encode(text, allow_special=True) == ids
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("text", LOOKALIKES)
def test_lookalikes_in_the_real_vocabulary_stay_text(real: Pair, text: str) -> None:
    tokenizer, _ = real
    ids = tokenizer.encode(text)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("data", INVALID)
def test_invalid_bytes_survive_where_the_real_vocabulary_has_them(real: Pair, data: bytes) -> None:
    tokenizer, _ = real
    back = b"".join(map(tokenizer.token_bytes, tokenizer.encode(data)))
    known = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    text = data.decode("utf-8", "surrogateescape")
    expected = b"".join(_bytes_of(c, known) for c in text)
    assert back == expected


def _bytes_of(char: str, known: set[bytes]) -> bytes:
    raw = char.encode("utf-8", "surrogateescape")
    return raw if len(raw) > 1 or ord(char) < 128 or raw in known else "\ufffd".encode()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_encodes_as_the_original(
    library: Library, tokenizer: Tokenizer, text: str
) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        return
    ids = original(library, text)
    assert tokenizer.encode(text, allow_special=True) == ids
    assert tokenizer.decode(ids, skip_special=False) == text


@given(st.lists(st.sampled_from([*SPECIALS, "<|", "im_end", "|>", "<", "s>", " ", "x", "\n"])))
@settings(max_examples=200, deadline=None)
def test_no_user_text_becomes_a_control_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == text


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_come_back(tokenizer: Tokenizer, data: bytes) -> None:
    ids = tokenizer.encode(data)
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    assert ids == tokenizer.encode(data.decode("utf-8", "surrogateescape"))
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


def test_ordinary_text_that_merges_to_a_control_token_does_not() -> None:
    vocab = {c: i for i, c in enumerate("abcdef <>/s")} | {
        "<s": 20,
        "<s>": 21,
        "</": 22,
        "</s>": 23,
    }
    vocab |= {"s>": 24}
    library = Library(models.BPE(_dense(vocab), [("<", "s"), ("<s", ">"), ("s", ">")]))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>"])
    tokenizer = Tokenizer.from_json(library.to_str())
    ids = tokenizer.encode("a<s>b")
    assert vocab["<s>"] not in ids
    assert tokenizer.decode(ids) == "a<s>b"
    assert tokenizer.encode("a<s>b", allow_special=True).count(vocab["<s>"]) == 1


def _dense(vocab: dict[str, int]) -> dict[str, int]:
    fill = {f"fill{i}": i for i in range(25)}
    return {k: v for k, v in fill.items() if v not in vocab.values()} | vocab


def test_a_vocabulary_with_gaps_is_refused_rather_than_confused() -> None:
    library = Library(models.BPE({"a": 0, "b": 1, "c": 3}, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["b"])
    with pytest.raises(UnsupportedError, match="gaps"):
        Tokenizer.from_json(library.to_str())


def test_rstrip_lstrip_and_user_defined_tokens_follow_the_original() -> None:
    library = byte_level()
    library.add_special_tokens([AddedToken("<|user|>", special=True, rstrip=True)])
    library.add_special_tokens([AddedToken("<|mask|>", special=True, lstrip=True)])
    library.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<tool><s>x")])
    library.add_tokens([AddedToken("<s>|", normalized=False)])
    tokenizer = Tokenizer.from_json(library.to_str())
    for text in [
        "<|user|> \n hi",
        "a  <|mask|>  b",
        "x<tool>y",
        "<tool><s>",
        "<tool><s>x",
        "<s>x",
        "<s>|",
    ]:
        assert tokenizer.encode(text, allow_special=True) == original(library, text), text
    assert library.token_to_id("<tool>") in tokenizer.encode("x<tool>y")


def with_bos() -> Tokenizer:
    library = byte_level()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    return Tokenizer.from_json(library.to_str())


def test_bos_is_never_doubled() -> None:
    tokenizer = with_bos()
    assert tokenizer.bos == 3
    assert tokenizer.adds_bos
    plain = tokenizer.encode("hi")
    assert 3 not in plain
    assert tokenizer.encode_prompt("hi") == [3, *plain]
    assert tokenizer.encode_prompt("<s>hi") == [3, *plain]
    assert tokenizer.encode_prompt("<s>hi", allow_special=False)[1:] == tokenizer.encode("<s>hi")


def test_ids_outside_the_vocabulary_are_empty(tokenizer: Tokenizer) -> None:
    marks = range(tokenizer.vocab_size, tokenizer.vocab_size + 300)
    assert {tokenizer.token_bytes(i) for i in (*marks, -1, 2**31, 2**40)} == {b""}
    assert tokenizer.decode([-1, 2**40, *marks]) == ""


def test_vocab_size_is_the_originals(library: Library, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)


def test_ids_do_not_depend_on_the_random_mark(library: Library) -> None:
    first, second = (Tokenizer.from_json(library.to_str()) for _ in range(2))
    for text in CORPUS + LOOKALIKES:
        assert first.encode(text) == second.encode(text)
        marked = [t.encode_marked(t.marks.mark(text)) for t in (first, second)]
        assert marked[0] == marked[1]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": 1}', "\x00"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(FileError, match="tokenizer"):
        Tokenizer.from_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_an_unknown_decoder_is_named(library: Library) -> None:
    data = json.loads(library.to_str())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Tokenizer.from_json(json.dumps(data))


def test_a_long_text_is_looked_at_in_parts(tokenizer: Tokenizer) -> None:
    """Whoever wants its tokens may leave before they are all there, and hears early of what is far too long."""
    text = "😀\u0301 é" * (2 * PART)  # 8 parts, of more tokens than characters
    whole = tokenizer.encode(text)
    told: list[int] = []
    assert tokenizer.encode(text, check=told.append, look=lambda: None) == whole
    assert len(told) == 8
    assert told == sorted(told)
    assert len(whole) // 2 <= told[-1] <= len(whole)

    def enough(count: int) -> None:
        if count > 1000:
            raise InterruptedError(count)

    with pytest.raises(InterruptedError) as found:
        tokenizer.encode_prompt(text, check=enough)
    assert found.value.args[0] == told[0]
    looks = iter(range(3))

    def leaves() -> None:
        if next(looks) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tokenizer.encode(text, look=leaves)
    short = text[:PART]
    assert tokenizer.encode(short, check=enough, look=lambda: None) == tokenizer.encode(short)


def test_parts_never_have_twice_the_tokens(real: Pair) -> None:
    """What is said to be surely there is, also where a token holds many characters and a cut falls into one."""
    tokenizer, _ = real
    for unit in (" " * 97, "a" * 1001, "0123456789", "\n" * 64, "the quick brown fox "):
        text = (unit * (3 * PART // len(unit) + 1))[: 3 * PART - 7]
        told: list[int] = []
        whole = tokenizer.encode(text, check=told.append)
        assert told[-1] <= len(whole)
