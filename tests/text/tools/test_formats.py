"""Which row of the table a model gets: by its template, and by its control tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.text.tools import formats
from headrace.text.tools.formats import HERMES, MISTRAL_THINK, THINK, detect
from text.tools.templates import ALL, PLAIN


@pytest.mark.parametrize("name", [n for n in ALL if n != "plain"])
def test_a_template_says_its_family(name: str) -> None:
    form = detect(ALL[name])
    assert form.name == name
    assert form.native
    assert form.controls == frozenset()


@pytest.mark.parametrize("template", [None, "", PLAIN, "{% for t in tools %}<|my_call|>{% endfor %}", "{{ tools }}<tool_call>{{ '<arg_key>' }}"])  # fmt: skip
def test_every_other_template_gets_its_tools_as_text(template: str | None) -> None:
    assert detect(template) == replace(HERMES, native=False)


@pytest.mark.parametrize("name", ALL)
def test_tags_are_control_tokens_where_the_vocabulary_says_so(name: str) -> None:
    form = detect(ALL[name], ["<s>", *detect(ALL[name]).tags])
    assert form.controls == (frozenset(form.tags) if form.native else frozenset())
    assert form.is_control(form.tags[0]) == form.native


def test_a_prompt_may_end_within_reasoning() -> None:
    form = detect(ALL["qwen-xml"])
    assert form.opens_reasoning("…<|im_start|>assistant\n<think>\n")
    assert not form.opens_reasoning("…<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not replace(form, think=None).opens_reasoning("<think>\n")
    assert detect(ALL["harmony"]).opens_reasoning(
        "<|start|>assistant<|channel|>analysis<|message|>"
    )
    assert not detect(ALL["harmony"]).opens_reasoning("<|start|>assistant")


def test_reasoning_is_known_from_template_or_vocabulary() -> None:
    assert detect(ALL["hermes"]).think == THINK
    assert detect(ALL["llama"]).think is None
    assert detect(PLAIN, ["<think>", "</think>"]).think == THINK
    assert detect(PLAIN, ["<think>", "</think>"]).controls == {"<think>", "</think>"}
    assert detect(ALL["mistral-args"] + "[/THINK]").think == MISTRAL_THINK
    assert detect(ALL["harmony"]).think is None


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in formats.FORMATS}) == len(formats.FORMATS)
