"""No template takes long, makes much, or reaches out of its sandbox; every refusal is one line."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import TemplateError
from headrace.text.meter import Limits
from headrace.text.template import ChatTemplate

TALK = [{"role": "user", "content": "hello " * 20}]
DAG = "{% set ns = namespace(a=['x']) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
TUPLES = DAG.replace("['x']", "(1,)").replace("[ns.a, ns.a]", "(ns.a, ns.a)")
GROW = "{% set ns = namespace(s='ab') %}{% for i in range(90) %}{% set ns.s = GROWN %}{% endfor %}{{ ns.s }}"
BOMBS = {
    "range": "{% for i in range(10**12) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "x{% endfor %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "silent loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{% for i in range(9) %}{{ loop([1] * 50000) }}"
    "{% endfor %}{{ loop(range(99999)) }}{{ loop(range(99999)) }}{% endfor %}",
    "recursive macro": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "wide macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat from the left": "{{ 10**9 * 'a' }}",
    "repeat a list": "{{ ([1] * 10**9) | length }}",
    "power": "{{ 10**(10**9) }}",
    "power of a negative": "{{ (-3)**(2**40) }}",
    "product": "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "format map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format attr": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "join": "{{ ('x' * 100000).join(range(99999) | map('string')) }}",
    "join filter": "{{ range(99999) | join('x' * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "doubling": GROW.replace("GROWN", "ns.s + ns.s"),
    "doubling by ~": GROW.replace("GROWN", "ns.s ~ ns.s"),
    "doubling by %": GROW.replace("GROWN", "'%s%s' % (ns.s, ns.s)"),
    "doubling by format": GROW.replace("GROWN", "'{0}{0}'.format(ns.s)"),
    "doubling by join": GROW.replace("GROWN", "[ns.s, ns.s] | join"),
    "doubling lists": GROW.replace("'ab'", "[1]").replace("GROWN", "ns.s + ns.s"),
    "doubling by tojson": GROW.replace("GROWN", "[ns.s, ns.s] | tojson"),
    "doubling by escape": GROW.replace("GROWN", "(('<' ~ ns.s ~ ns.s) | e) ~ ''"),
    "doubling by set": GROW.replace("{% set ns.s = GROWN %}",
                                    "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "doubling by macro": "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{{ x }}{{ x }}{% else %}ab"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "output": "{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "output in a macro": "{% macro f() %}{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}"
    "{% endmacro %}{{ f() | length }}",
    "kept strings": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + ['x' * 900000] %}{% endfor %}",
    "kept slices": "{% set s = 'x' * 900000 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "shared lists printed": DAG + "{{ ns.a }}",
    "shared lists as string": DAG + "{{ (ns.a | string) | length }}",
    "shared lists as json": DAG + "{{ (ns.a | tojson) | length }}",
    "shared lists compared": DAG + DAG.replace("ns", "other") + "{{ ns.a == other.a }}",
    "shared lists sought": DAG + DAG.replace("ns", "other") + "{{ ns.a in [other.a] }}",
    "shared lists indexed": DAG + DAG.replace("ns", "other") + "{{ [other.a].index(ns.a) }}",
    "shared lists joined": DAG + "{{ [ns.a] | join | length }}",
    "shared lists by ~": DAG + "{{ (ns.a ~ '') | length }}",
    "shared lists by %": DAG + "{{ ('%s' % ns.a) | length }}",
    "shared lists by format": DAG + "{{ '{}'.format(ns.a) | length }}",
    "shared lists upper": DAG + "{{ ns.a | upper | length }}",
    "shared lists sorted": DAG + DAG.replace("ns", "other") + "{{ [ns.a, other.a] | sort | length }}",
    "shared lists changed": DAG + DAG.replace("ns", "other")
    + "{% for x in [ns.a, other.a] %}{{ loop.changed(x) }}{% endfor %}",
    "shared lists raised": DAG + "{{ raise_exception(ns.a) }}",
    "shared tuples as keys": TUPLES + "{% set d = {ns.a: 1} %}",
    "shared tuples looked up": TUPLES + "{{ {}[ns.a] }}",
    "shared tuples in dict()": TUPLES + "{{ dict([(ns.a, 1)]) | length }}",
    "shared tuples unique": TUPLES + "{{ [ns.a] | unique | list | length }}",
    "repeated search": "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ 'x' in l }}{% endfor %}",
    "repeated slices": "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set m = l[1:] %}{% endfor %}",
    "repeated sort": "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set m = l | sort %}{% endfor %}",
    "repeated split": "{% set s = 'a ' * 90000 %}{% for i in range(99999) %}{% set m = s.split() %}{% endfor %}",
    "sum of lists": "{{ (range(99999) | map('string') | map('list') | sum(start=[])) | length }}",
    "lazy chain": "{% for a in range(99999) %}{{ range(99999)" + " | map('string')" * 50 + " | list | length }}{% endfor %}",
    "indent": "{{ 'a\n' | indent(10**9) }}",
    "json indent": "{{ [[[1]]] | tojson(indent=10**9) }}",
    "json indent of many": "{% set ns = namespace(a=range(9000) | list) %}{% for i in range(90) %}"
    "{% set ns.a = [ns.a] %}{% endfor %}{% for i in range(99) %}{{ ns.a | tojson(indent=16) }}{% endfor %}",
    "json separators": "{{ range(9999) | list | tojson(separators=('x' * 100000, ':')) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "int": "{{ ('f' * 900000) | int(0, 16) }}",
    "literal": "{{ " + "9" * 200_000 + " }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "sums": "{{ " + "1+" * 50_000 + "1 }}",
    "nots": "{{ " + "not " * 30_000 + "1 }}",
    "ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "fors": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "elifs": "{% if 0 %}" + "{% elif x %}" * 15_000 + "{% endif %}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "length": "x" * 300_000,
}  # fmt: skip
ESCAPES = [
    "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['x'] }}",
    "{{ strftime_now.__closure__[0] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}{{ ''.encode().hex() }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a\t'.expandtabs(10**9) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ range.mro() }}",
    "{{ (messages | map('string')).gi_frame.f_globals }}",
    "{{ lipsum() }}",
    "{{ 'a' | center(10**9) }}",
    "{{ messages | pprint }}",
    "{{ [1] | random }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% autoescape true %}{% endautoescape %}",
]
BROKEN = ["{{", "{% for %}", "{% endfor %}", "{{ x | nope }}", "{{ x is nope }}", "{{ 1 / 0 }}",
          "{{ x.y.z }}", "{{ messages[0].content() }}", "{{ none + 1 }}", "{{ raise_exception() }}",
          "{{ raise_exception('') }}", "{{ [1] | first | sort }}"]  # fmt: skip


def refused(source: str) -> str:
    """The refusal of a template; fails when it is slow, large or leaves a thread behind."""
    threads, start = threading.active_count(), time.process_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(TALK)
    assert time.process_time() - start < 5
    assert threading.active_count() == threads
    message = caught.value.message
    assert message.startswith("chat template: ")
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("name", list(BOMBS))
def test_bombs_are_stopped(name: str) -> None:
    refused(BOMBS[name])


@pytest.mark.parametrize(
    "name", ["kept strings", "kept slices", "doubling lists", "output in a macro"]
)
def test_bombs_stay_small(name: str) -> None:
    tracemalloc.start()
    try:
        refused(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = ChatTemplate(source).render(TALK)
    except TemplateError as error:
        assert "\n" not in error.message
    else:
        assert text == ""  # an undefined value, as jinja2 writes it


@pytest.mark.parametrize("source", BROKEN)
def test_broken_templates_are_refused_in_one_line(source: str) -> None:
    refused(source)


def test_the_same_template_is_refused_after_the_same_steps() -> None:
    limits = Limits(steps=1000)
    for count, good in ((300, True), (30_000, False)):
        template = ChatTemplate(
            "{% for i in range(" + str(count) + ") %}x{% endfor %}", limits=limits
        )
        for _ in range(3):
            if good:
                assert template.render([]) == "x" * count
            else:
                with pytest.raises(TemplateError, match="more than .*,000 steps"):
                    template.render([])


def test_a_refused_rendering_does_not_spoil_the_next() -> None:
    template = ChatTemplate("{% if messages %}{{ 'a' * 10**9 }}{% else %}ok{% endif %}")
    with pytest.raises(TemplateError) as refused_once:
        template.render(TALK)
    assert "text of more than" in refused_once.value.message
    assert template.render([]) == "ok"


def test_the_clock_bounds_what_steps_do_not() -> None:
    template = ChatTemplate("{% for i in messages %}x{% endfor %}", limits=Limits(seconds=-1))
    with pytest.raises(TemplateError, match="seconds"):
        template.render(TALK)


def test_long_conversations_are_within_bounds() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and messages | length - 1 != loop.index0 %}"
        "{{ '<|u|>' + m.content | trim + '\n' }}{% else %}{% set c = m.content.split('</think>')[-1] %}"
        "{{ '<|a|>' ~ c.strip() ~ '\n' }}{% endif %}{% endfor %}"
    )
    talk = [{"role": r, "content": "word " * 400} for r in ("user", "assistant")] * 1000
    start = time.process_time()
    assert len(ChatTemplate(source).render(talk)) == 2000 * (400 * 5 - 1 + 6)
    assert time.process_time() - start < 2


FRAGMENTS = st.sampled_from(
    ["{{", "}}", "{%", "%}", " for i in ", "range(", "9", ")", " endfor ", "'a'", "*", "**", "|", "join",
     "x", " set x = ", "[", "]", ",", "~", " if ", " endif ", "messages", ".", "format", "%", "(", "{#"]
)  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=25).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_template_renders_or_is_refused(source: str) -> None:
    try:
        ChatTemplate(source).render(TALK)
    except TemplateError as error:
        assert "\n" not in error.message
