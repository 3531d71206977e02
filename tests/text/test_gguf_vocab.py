"""GGUF vocabularies encode as the tokenizers they were made from, and hostile ones are refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from text_corpus import CORPUS, INVALID, LOOKALIKES
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from headrace.artifact.container import open_artifact
from headrace.errors import FileError, InputError, UnsupportedError
from headrace.text import charsmap
from headrace.text.gguf_vocab import build_tokenizer_json
from headrace.text.tokenizer import Tokenizer

Meta = dict[str, Any]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
TEXTS = [t for t in CORPUS if "\u2581" not in t]


def keys(**values: object) -> Meta:
    return {f"tokenizer.ggml.{k}": v for k, v in values.items()}


def as_metadata(library: Library, pre: str) -> Meta:
    """What a GGUF of this byte-level tokenizer holds."""
    data = json.loads(library.to_str())
    special = {a["id"] for a in data["added_tokens"]}
    pieces = sorted(library.get_vocab().items(), key=lambda item: item[1])
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    return keys(
        model="gpt2",
        pre=pre,
        tokens=[piece for piece, _ in pieces],
        token_type=[CONTROL if i in special else NORMAL for _, i in pieces],
        merges=merges,
        eos_token_id=2,
    )


def trained(library: Library) -> Library:
    library.decoder = ByteLevelDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS * 2, trainer)
    return library


def gpt2() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(library)


def llama3() -> Library:
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    pattern = convert.TikTokenConverter().pattern  # the published pattern of Llama 3
    library = Library(models.BPE(ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return trained(library)


def qwen2() -> Library:
    transformers = pytest.importorskip("transformers")
    seed = json.loads(gpt2().to_str())["model"]
    merges = [tuple(m) for m in seed["merges"]]
    tokenizer = transformers.Qwen2Tokenizer(vocab=seed["vocab"], merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    return tokenizer.backend_tokenizer


@pytest.fixture(scope="module", params=["gpt-2", "llama-bpe", "qwen2"])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Library]:
    """A tokenizer made from metadata, and the one that the metadata came from."""
    library = {"gpt-2": gpt2, "llama-bpe": llama3, "qwen2": qwen2}[request.param]()
    built = build_tokenizer_json(as_metadata(library, request.param))
    return Tokenizer.from_json(built), library


def same(pair: tuple[Tokenizer, Library], text: str) -> None:
    ours, theirs = pair
    ids = list(theirs.encode(text, add_special_tokens=False).ids)
    assert ours.encode(text, allow_special=True) == ids
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", CORPUS + LOOKALIKES)
def test_byte_level_vocabularies_equal_the_original(
    pair: tuple[Tokenizer, Library], text: str
) -> None:
    same(pair, text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=150, deadline=None)
def test_any_text_equals_the_original(pair: tuple[Tokenizer, Library], text: str) -> None:
    same(pair, text)


@pytest.mark.parametrize("text", LOOKALIKES)
def test_lookalikes_stay_text(pair: tuple[Tokenizer, Library], text: str) -> None:
    ids = pair[0].encode(text)
    assert not any(map(pair[0].is_special, ids))
    assert pair[0].decode(ids) == text


@pytest.mark.parametrize("data", INVALID)
def test_invalid_bytes_come_back(pair: tuple[Tokenizer, Library], data: bytes) -> None:
    assert b"".join(map(pair[0].token_bytes, pair[0].encode(data))) == data


@pytest.fixture(scope="module")
def smollm(shared_models: Path) -> Library:
    path = shared_models / "smolmoe" / "tokenizer.json"
    if not path.is_file():
        pytest.skip("smolmoe/tokenizer.json is not among the shared models")
    return Library.from_file(str(path))


def test_smollm_metadata_equals_its_original(smollm: Library) -> None:
    built = build_tokenizer_json(as_metadata(smollm, "smollm"))
    for text in CORPUS + LOOKALIKES:
        same((Tokenizer.from_json(built), smollm), text)


def test_the_real_gguf_equals_its_original(smollm: Library, default_model: Path) -> None:
    """The pull made this tokenizer from the metadata of the registry's GGUF."""
    artifact = open_artifact(default_model)
    assert artifact.manifest.source["kind"] == "gguf"
    ours = Tokenizer.from_file(artifact.tokenizer_path)
    for text in CORPUS + LOOKALIKES:
        same((ours, smollm), text)
    info = artifact.manifest.tokenizer
    assert (info.bos, info.add_bos, info.end) == (1, False, (2, 0))


def sentences() -> list[str]:
    return [line for t in TEXTS for line in t.split("\n") if line.strip() and "\0" not in line] * 3


def spm(kind: str, **options: object) -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece model of the corpus."""
    out = io.BytesIO()
    settings_ = {"vocab_size": 600, "character_coverage": 0.98}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=out,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=9,
        **(settings_ | options),
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def spm_metadata(model: sentencepiece.SentencePieceProcessor, name: str, **more: object) -> Meta:
    count = model.get_piece_size()
    kinds = [_kind(model, i) for i in range(count)]
    return keys(
        model=name,
        tokens=[model.id_to_piece(i) for i in range(count)],
        scores=np.array([model.get_score(i) for i in range(count)], dtype=np.float32),
        token_type=np.array(kinds, dtype=np.int32),
        bos_token_id=np.uint32(model.bos_id()),
        eos_token_id=model.eos_id(),
        **more,
    )


def _kind(model: sentencepiece.SentencePieceProcessor, index: int) -> int:
    for test, kind in (
        (model.is_control, CONTROL), (model.is_unknown, UNKNOWN),
        (model.is_byte, BYTE), (model.is_unused, UNUSED),
    ):  # fmt: skip
        if test(index):
            return kind
    return NORMAL


BARE = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.fixture(scope="module", params=["bpe", "bpe without prefix", "unigram", "unigram bytes"])
def spm_pair(
    request: pytest.FixtureRequest,
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    kind, prefix = request.param.split()[0], "without" not in request.param
    fallback = request.param != "unigram"
    model = spm(kind, byte_fallback=fallback, add_dummy_prefix=prefix, **IDENTITY)
    name = "llama" if kind == "bpe" else "t5"
    metadata = spm_metadata(model, name, add_space_prefix=prefix, remove_extra_whitespaces=False)
    return Tokenizer.from_json(build_tokenizer_json(metadata)), model


@pytest.mark.parametrize("text", TEXTS + LOOKALIKES)
def test_sentencepiece_models_equal_the_original(
    spm_pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, theirs = spm_pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    if theirs.unk_id() not in ids:
        assert ours.decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize("data", INVALID)
def test_sentencepiece_models_read_invalid_bytes_as_the_original(
    spm_pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], data: bytes
) -> None:
    ours, theirs = spm_pair
    assert ours.encode(data) == theirs.encode(data)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581")))
@settings(max_examples=150, deadline=None)
def test_any_text_equals_sentencepiece(
    spm_pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, theirs = spm_pair
    assert ours.encode(text) == theirs.encode(text)


def test_whitespace_is_collapsed_as_sentencepiece_does() -> None:
    rule = {"normalization_rule_name": "identity", "remove_extra_whitespaces": True}
    model = spm("unigram", **rule)
    ours = Tokenizer.from_json(build_tokenizer_json(spm_metadata(model, "t5")))
    for text in ["  a   b  ", "a\n  b", "   ", "x", " \n "]:
        assert ours.encode(text) == model.encode(text), text


def charsmap_of(model: sentencepiece.SentencePieceProcessor) -> bytes:
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(model.serialized_model_proto())
    return bytes(proto.normalizer_spec.precompiled_charsmap)


@pytest.fixture(scope="module")
def normalising() -> sentencepiece.SentencePieceProcessor:
    return spm("unigram", normalization_rule_name="nmt_nfkc")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, None])
def test_a_precompiled_charsmap_normalises_as_the_original(
    normalising: sentencepiece.SentencePieceProcessor, dtype: type[np.generic] | None
) -> None:
    data = np.frombuffer(charsmap_of(normalising), dtype or np.uint8)
    table = data if dtype else data.tolist()
    ours = Tokenizer.from_json(
        build_tokenizer_json(spm_metadata(normalising, "t5", precompiled_charsmap=table))
    )
    for text in ["\u3000\uff21\ufb01\u2460  x\t\ty", "\u212b e\u0301", "plain  text ", "\u200ba"]:
        assert ours.encode(text) == normalising.encode(text), text


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 100, 1000, -1, -1000])
def test_a_damaged_charsmap_is_refused_or_harmless(
    normalising: sentencepiece.SentencePieceProcessor, cut: int
) -> None:
    data = charsmap_of(normalising)
    for table in (data[:cut], b"\xff" * 4 + data[4:cut], data[:4] + b"\xff" * 400 + data[404:cut]):
        metadata = spm_metadata(normalising, "t5", precompiled_charsmap=list(table))
        try:
            Tokenizer.from_json(build_tokenizer_json(metadata)).encode("\uff21\ufb01 e\u0301\u3000")
        except InputError as error:
            assert "\n" not in error.message


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_charsmap_with_wrong_units_never_leaves_the_table(
    normalising: sentencepiece.SentencePieceProcessor, data: st.DataObject
) -> None:
    table = bytearray(charsmap_of(normalising))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 2000), st.integers(0, len(table) - 4)))
        table[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    source = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    if charsmap.fault(bytes(table)) is None:
        library = Library.from_str(json.dumps(BARE | {"normalizer": source}))
        library.normalizer.normalize_str("".join(map(chr, range(1, 0x3000, 7))))


def test_control_tokens_of_a_unigram_model_are_not_cut_from_text() -> None:
    model = spm("unigram", **IDENTITY)
    ours = Tokenizer.from_json(build_tokenizer_json(spm_metadata(model, "t5")))
    assert {model.bos_id(), model.eos_id()}.isdisjoint(ours.encode("a</s>b<s>"))
    assert model.eos_id() in ours.encode("a</s>", allow_special=True)


def test_added_bos_comes_from_the_metadata() -> None:
    model = spm("bpe", byte_fallback=True, **IDENTITY)
    metadata = spm_metadata(model, "llama")
    assert Tokenizer.from_json(build_tokenizer_json(metadata)).encode_prompt("a")[0] == 1
    metadata |= keys(add_bos_token=False)
    assert Tokenizer.from_json(build_tokenizer_json(metadata)).encode_prompt("a")[0] != 1


SMALL = keys(
    model="gpt2", pre="gpt-2", tokens=["a", "b", "ab", "<e>"], merges=["a b"],
    token_type=[1, 1, 1, 3], eos_token_id=3,
)  # fmt: skip
SPM_SMALL = keys(model="llama", tokens=["<unk>", "a"], scores=[0.0, -1.0], token_type=[2, 1])


def test_the_small_vocabularies_are_good() -> None:
    assert Tokenizer.from_json(build_tokenizer_json(SMALL)).encode("ab<e>")[0] == 2
    assert Tokenizer.from_json(build_tokenizer_json(SPM_SMALL)).encode("a") == [0, 1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (keys(model="bert"), "model 'bert' is not supported; only: gpt2, llama, t5"),
        (
            keys(pre="falcon"),
            "pre 'falcon' is not supported; supported: .*smollm.*qwen2.*llama-bpe",
        ),
        (keys(pre="default"), "pre 'default' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(change: Meta, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        build_tokenizer_json(SMALL | change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (keys(model=3), "model: it is not a string"),
        (keys(tokens=[]), "tokens: it is empty"),
        (keys(tokens="abcd"), "tokens: it is not an array"),
        (keys(tokens=["a", "b", "ab", 4]), "tokens: item 3"),
        (keys(tokens=["a", "b", "ab", "x" * 5000]), "tokens: item 3"),
        (keys(tokens=["a", "b", "ab", "\udc80"]), "tokens: item 3"),
        (keys(tokens=["a", "b", "ab", "a"]), "items 0 and 3 are both 'a'"),
        (keys(token_type=[1, 1, 3]), "token_type: it holds 3 items, tokens holds 4"),
        (keys(token_type=[1, 1, 1, 9]), "token_type: item 3 is 9"),
        (keys(token_type=[1, 1, 1, [1]]), "token_type: item 3"),
        (keys(merges=["a c"]), "merges: item 0 is 'a c': no such token"),
        (keys(merges=["b a"]), "no such token"),
        (keys(merges=["ab"]), "not two tokens"),
        (keys(merges=["a b b"]), "not two tokens"),
        (keys(merges=[" "]), "not two tokens"),
        (keys(merges=7), "merges: it is not an array"),
        (keys(add_bos_token=1), "add_bos_token: it is not a boolean"),
        (keys(add_bos_token=True, bos_token_id=4), "bos_token_id: it is 4, the vocabulary has 4"),
        (keys(add_bos_token=True, bos_token_id="x"), "bos_token_id: it is not an integer"),
    ],
)
def test_hostile_metadata_is_refused(change: Meta, match: str) -> None:
    with pytest.raises(FileError, match=match):
        build_tokenizer_json(SMALL | change, "evil.gguf")


@pytest.mark.parametrize("scores", [[0.0], [0.0, float("nan")], [0.0, "1"], None, [0.0, 1e999]])
def test_hostile_scores_are_refused(scores: object) -> None:
    with pytest.raises(FileError, match="scores"):
        build_tokenizer_json(SPM_SMALL | keys(scores=scores))


def test_missing_keys_are_refused() -> None:
    for key in ("model", "pre", "tokens", "merges"):
        with pytest.raises(FileError, match=f"{key}: it is missing"):
            build_tokenizer_json({k: v for k, v in SMALL.items() if not k.endswith("." + key)})


def test_unused_tokens_may_share_a_name_and_are_never_made() -> None:
    metadata = SMALL | keys(tokens=["a", "b", "ab", "x", "x"], token_type=[1, 1, 1, 5, 5])
    tokenizer = Tokenizer.from_json(build_tokenizer_json(metadata | keys(eos_token_id=2)))
    assert tokenizer.vocab_size == 5
    assert {3, 4}.isdisjoint(tokenizer.encode("x 3 x", allow_special=True))


VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.lists(st.one_of(st.integers(-1, 9), st.text("ab <", max_size=3), st.floats()), max_size=5),
)  # fmt: skip
NAMES = st.sampled_from(
    ["model", "pre", "tokens", "merges", "token_type", "scores", "bos_token_id", "add_bos_token",
     "add_space_prefix", "precompiled_charsmap", "remove_extra_whitespaces"]
)  # fmt: skip


@given(
    st.sampled_from([SMALL, SPM_SMALL, SPM_SMALL | keys(model="t5")]), st.dictionaries(NAMES, VALUE)
)
@settings(max_examples=400, deadline=None)
def test_any_metadata_is_built_or_refused(base: Meta, change: Meta) -> None:
    try:
        tokenizer = Tokenizer.from_json(build_tokenizer_json(base | keys(**change)))
        tokenizer.encode("ab <e> \u3000\xff")
    except InputError as error:
        assert "\n" not in error.message
