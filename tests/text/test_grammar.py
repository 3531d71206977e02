"""Grammars over real vocabularies: masks are exact to the byte, forced tokens are those of the masks, bombs are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

import tiny
from headrace.errors import ConstraintError, GrammarError, InputError
from headrace.text.grammar import KEPT_CHARACTERS, Grammar, GrammarCompiler, Walk
from headrace.text.tokenizer import Tokenizer

END = 258
OBJECT = {
    "type": "object",
    "properties": {"name_of_it": {"type": "string"}, "on": {"type": "boolean"}},
    "required": ["name_of_it", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Every byte is a token."""
    return Tokenizer.from_json(tiny.tokenizer_json(), eos=(END,))


@pytest.fixture(scope="module")
def compiler(letters: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(letters)


@pytest.fixture(scope="module")
def real(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(default_model / "tokenizer.json", eos=(2, 0))


def allowed(walk: Walk) -> set[int]:
    bits = np.unpackbits(walk.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(walk: Walk, tokens: list[int]) -> Walk:
    for token in tokens:
        assert token in allowed(walk)
        walk.advance(token)
    return walk


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str | bytes) -> bool:
    """Whether the whole text satisfies the grammar, by masks alone, without forcing."""
    walk = grammar.start()
    for token in tokenizer.encode(text):
        if walk.ended or token not in allowed(walk):
            return False
        walk.advance(token)
    return walk.can_end


def test_a_regex_allows_what_it_matches(compiler: GrammarCompiler, letters: Tokenizer) -> None:
    grammar = compiler.regex("(ab|cd)+e?")
    for text in ("ab", "abcd", "cdabe"):
        assert accepts(grammar, letters, text)
    for text in ("", "a", "abe e", "e", "abee"):
        assert not accepts(grammar, letters, text)


def test_ends_are_allowed_only_where_it_can_end(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    walk = compiler.regex("ab*").start()
    assert END not in allowed(walk)
    with pytest.raises(ConstraintError, match="too early"):
        walk.advance(END)
    follow(walk, letters.encode("ab"))
    assert walk.can_end
    assert not walk.ended
    follow(walk, [END])
    assert walk.ended


def test_both_notations_of_a_grammar(compiler: GrammarCompiler, letters: Tokenizer) -> None:
    lark = compiler.ebnf('start: pair ("," pair)*\npair: NAME "=" NAME\nNAME: /[a-z]+/\n')
    gbnf = compiler.ebnf('root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [a-z]+\n')
    for grammar in (lark, gbnf):
        assert accepts(grammar, letters, "a=b,cd=ef")
        assert not accepts(grammar, letters, "a=b,")


@pytest.mark.parametrize("text", ["é", "日本", "🙂", "a🙂é"])
def test_characters_of_several_tokens(
    compiler: GrammarCompiler, letters: Tokenizer, text: str
) -> None:
    """Within a character only bytes that can finish a character come next."""
    grammar = compiler.regex(".+")
    walk = grammar.start()
    seen = b""
    for token in letters.encode(text):
        follow(walk, [token])
        seen += letters.token_bytes(token)
        whole = seen.decode("utf-8", "ignore").encode() == seen
        assert walk.can_end == whole
        if not whole:
            assert {letters.token_bytes(t)[0] & 0xC0 for t in allowed(walk)} == {0x80}


def test_bytes_outside_utf8_never_follow(compiler: GrammarCompiler, letters: Tokenizer) -> None:
    first = {letters.token_bytes(t)[0] for t in allowed(compiler.regex("(?s:.)+").start())}
    assert first == {*range(0x80), *range(0xC2, 0xF5)}


def test_tokens_straddle_the_parts_of_a_grammar(real: Tokenizer) -> None:
    """A token may end one part and begin the next, so every way to cut a text is a way through."""
    grammar = GrammarCompiler(real).schema(OBJECT)
    text = '{"name_of_it": "x", "on": true}'
    tokens = real.encode(text)
    assert any(real.token_bytes(t) in (b'{"', b'",', b'":') for t in tokens)
    assert accepts(grammar, real, text)
    pieces = [t for c in text for t in real.encode(c)]
    assert pieces != tokens


def closing(tokenizer: Tokenizer, choices: set[int]) -> int:
    """The choice that ends a string soonest."""
    return min(choices, key=lambda t: (b'"' not in tokenizer.token_bytes(t), t))


def test_forced_tokens_are_the_only_ones_of_the_masks(real: Tokenizer) -> None:
    """A span that is forced is what a greedy decoder would be left with, token by token."""
    compiler = GrammarCompiler(real)
    for schema in (
        OBJECT,
        {"const": ["long constant text", {"k": None}]},
        {"enum": ["order", "orderName"]},
    ):
        walk, spans = compiler.schema(schema).start(), 0
        while not walk.ended:
            forced = walk.fork().forced()
            for token in forced:
                assert allowed(walk) == {token}
                walk.advance(token)
            spans += bool(forced)
            if not forced and not walk.ended:
                walk.advance(closing(real, allowed(walk)))
        assert spans


def test_forced_bytes_are_cut_as_the_tokenizer_cuts_them(real: Tokenizer) -> None:
    forced = GrammarCompiler(real).schema(OBJECT).start().forced()
    text = b"".join(map(real.token_bytes, forced)).decode()
    assert '{"name_of_it":'.startswith(text)
    assert len(text) > 10
    assert forced == real.encode('{"name_of_it":')[: len(forced)]


def test_fork_and_rollback(compiler: GrammarCompiler, letters: Tokenizer) -> None:
    walk = follow(compiler.schema(OBJECT).start(), letters.encode('{"name_of_it":"'))
    before = allowed(walk)
    other = walk.fork()
    follow(other, letters.encode('x","on":true}'))
    follow(other, [END])
    assert other.ended
    assert allowed(walk) == before
    other.rollback(1)
    assert other.can_end
    other.rollback(len(letters.encode('x","on":true}')))
    assert allowed(other) == before
    assert not other.can_end
    follow(other, letters.encode('y","on":false}'))
    assert other.can_end


def test_a_token_that_is_not_allowed_is_refused(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    walk = compiler.regex("ab").start()
    with pytest.raises(ConstraintError):
        walk.advance(letters.encode("x")[0])


def test_no_whitespace_and_no_control_characters(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    grammar = compiler.schema({"type": "array", "items": {"type": "string"}})
    for text in ('["a","b"]', '["a", "b"]', "[]", '["\\n\\u0001\\t"]', '["\u00e9 "]'):
        assert accepts(grammar, letters, text)
        json.loads(text)
    for text in (
        '[ "a"]',
        '["a" ]',
        '["a",  "b"]',
        '["a",\n"b"]',
        '["\n"]',
        '["\t"]',
        '["\x01"]',
        " []",
        "[] ",
    ):
        assert not accepts(grammar, letters, text)


def test_control_tokens_are_never_text(real: Tokenizer) -> None:
    walk = GrammarCompiler(real).regex("(?s:.*)").start()
    special = {t for t in range(real.vocab_size) if real.is_special(t)}
    assert allowed(walk) & special == {0, 2}


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.schema(OBJECT)
    assert compiler.schema(json.dumps(OBJECT, indent=2)) is first
    assert compiler.schema({**OBJECT, "title": "other"}) is not first
    assert first.digest == compiler.schema(OBJECT).digest


def test_a_librarys_options_are_not_a_schemas_to_set(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    loose = {"type": "array", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert not accepts(compiler.schema(loose), letters, "[ ]")
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiler.schema({**loose, "uniqueItems": True})


def test_an_unending_grammar_is_not_compiled(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="no text"):
        compiler.ebnf('start: start "a"')


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{2,1}", "(?=a)b", r"(a)\1", "[z-a]", "", "  ", "(" * 2000 + "a" + ")" * 2000],
)
def test_bad_regexes(compiler: GrammarCompiler, pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.regex(pattern)
    assert caught.value.code == "schema_unsupported"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    ['start: "a', "root ::= nothere", "start: nothere", "x", 'start: <|nothere|> "a"', "start: %json {",
     "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "start: " + "(" * 9000 + '"a"' + ")" * 9000, "{}"],
)  # fmt: skip
def test_bad_grammars(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(GrammarError):
        compiler.ebnf(text)


def test_wrong_types_are_refused(compiler: GrammarCompiler) -> None:
    for call in (compiler.regex, compiler.ebnf):
        with pytest.raises(InputError):
            call(5)  # type: ignore[arg-type]


def walked(grammar: Grammar, tokens: int = 40) -> None:
    """Some steps, each with the token of the fewest bytes; a limit is a typed error."""
    walk = grammar.start()
    for _ in range(tokens):
        if walk.ended:
            return
        walk.forced()
        walk.advance(max(allowed(walk)))


BOMBS = [
    lambda c: c.regex("(a{1000}){1000}"),
    lambda c: c.regex("((a{1000}){1000}){1000}b"),
    lambda c: c.regex("(.*a.{30}){5}"),
    lambda c: c.regex(r"\w{1,900}\d{1,900}\w{1,900}"),
    lambda c: c.ebnf('start: ("a"{1000}){1000}'),
    lambda c: c.ebnf('start: "a"{1000000000}'),
    lambda c: c.ebnf('start: (x{1000}){1000}\nx: "a" start?'),
    lambda c: c.ebnf('start: start start | "a" | ""'),
    lambda c: c.schema({"enum": [f"value {i}" for i in range(20_000)]}),
    lambda c: c.schema({"type": "array", "items": {"type": "object"}, "minItems": 10**9}),
    lambda c: c.schema({"type": "string", "minLength": 10**6, "maxLength": 10**8}),
    lambda c: c.schema({"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i + 1}]} for i in range(20)]}),
    lambda c: c.schema({"$ref": "#/$defs/a39", "$defs": doubling(40)}),
    lambda c: c.schema({"properties": {f"p{i}": {} for i in range(1500)}}),
]  # fmt: skip


def doubling(levels: int) -> dict[str, object]:
    """Definitions each of which holds the one before twice."""
    below = {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i - 1}"}] * 2, "items": False} for i in range(1, levels)}  # fmt: skip
    return {"a0": {"type": "integer"}, **below}


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_bombs_end_in_steps_or_in_typed_errors(compiler: GrammarCompiler, number: int) -> None:
    try:
        walked(BOMBS[number](compiler))
    except (GrammarError, ConstraintError) as error:
        assert error.message


def spaced() -> Tokenizer:
    """A vocabulary that puts a space in front of every text, and falls back to bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz{}\"':,_0123456789", "▁"})
    merges = [("n", "a"), ("m", "e"), ("na", "me"), ("▁", "name"), ("{", '"'), ('"', ":")]
    pieces += [*letters, *(a + b for a, b in merges)]
    library = Library(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer.from_json(library.to_str(), eos=(1,))


def test_a_tokenizer_that_adds_a_space() -> None:
    """The bytes of an answer are the grammar's: no space in front, none left out."""
    tokenizer = spaced()
    assert tokenizer.token_bytes(tokenizer.encode("name")[0]) == b" name"
    compiler = GrammarCompiler(tokenizer)
    for text in ('{"name": 1, "é": "a"}', " name", "name name", "日"):
        walk, tokens = compiler.regex(re.escape(text)).start(), []
        while not walk.ended:
            forced = walk.forced() or [min(allowed(walk))]
            for token in forced:
                walk.advance(token)
            tokens += forced
        stream = tokenizer.stream(continues=True)
        assert "".join(map(stream.push, tokens)) + stream.flush() == text
    walk = compiler.regex("name.*").start()
    assert b" name" not in {tokenizer.token_bytes(t) for t in allowed(walk)}


def test_a_vocabulary_without_an_end() -> None:
    tokenizer = Tokenizer.from_json(tiny.tokenizer_json())
    walk = GrammarCompiler(tokenizer).regex("ab?").start()
    walk.advance(tokenizer.encode("a")[0])
    assert walk.can_end
    assert allowed(walk) == set(tokenizer.encode("b"))
    walk.advance(tokenizer.encode("b")[0])
    assert walk.ended


def deep(rules: int, nested: int) -> str:
    """A grammar of rules that follow from each other, each with groups in groups."""
    links = (f"r{i}: " + '("a" ' * nested + f"r{i + 1}" + ")?" * nested for i in range(rules))
    return "\n".join(["start: r0", *links, f'r{rules}: "b"'])


@pytest.mark.parametrize(
    "text",
    [
        deep(20_000, 0).replace("r", "R").replace("staRt", "start"),
        deep(20_000, 0),
        deep(1000, 20),
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(2500)) + 'r2500 ::= "b"\n',
    ],
    ids=["terminals", "rules", "groups", "gbnf"],
)
def test_deep_grammars_are_not_too_much_for_a_stack(
    compiler: GrammarCompiler, letters: Tokenizer, text: str
) -> None:
    walk = compiler.ebnf(text).start()
    walk.advance(letters.encode("a" if "(" in text else "b")[0])
    assert walk.can_end


def test_long_gbnf_is_refused(compiler: GrammarCompiler) -> None:
    text = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(20_000))
    with pytest.raises(GrammarError, match="in GBNF"):
        compiler.ebnf(text)


def test_what_is_kept_has_a_bound(letters: Tokenizer) -> None:
    """By their texts: a long one drops what was kept before it."""
    compiler = GrammarCompiler(letters)
    short = compiler.regex("a")
    assert compiler.regex("a") is short
    half = {"type": "boolean", "description": "x" * (KEPT_CHARACTERS // 2)}
    compiler.schema(half)
    assert compiler.regex("a") is short
    newest = compiler.schema({**half, "title": "another"})
    assert compiler.schema({**half, "title": "another"}) is newest
    assert sum(len(g.text) for g in compiler._kept.values()) <= KEPT_CHARACTERS
