"""Rewrites a parsed chat template: its own text gets marks, its work gets metered.

Owns the places in jinja2's syntax tree that the environment cannot intercept: loops, comparisons,
slices, `~`, and the text of the template itself. Knows nothing of what the meter allows.
"""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

# Names that no template can write as a filter: they hold a space.
LOOP, TICK, DEEP, SLICE, CONCAT = "a loop", "a tick", "a comparison", "a slice", "a concatenation"
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from ... import",
    nodes.Extends: "extends",
    nodes.EvalContextModifier: "autoescape",
    nodes.ScopedEvalContextModifier: "autoescape",
}
_NODES_PER_STEP, _CHARS_PER_STEP = 8, 1024


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training: here just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Rewriter(NodeTransformer):
    """`mark` is applied to every text that the template itself holds."""

    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        refused = _REFUSED.get(type(node))
        if refused:
            raise TemplateError(f"{{% {refused} %}} is not supported")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return nodes.Const(self._mark(node.value)) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._mark(node.data), lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, LOOP)
        node.body.insert(0, _tick(node.body))
        return node

    def _body(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick(node.body))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _compared(node.expr)
        for operand in node.ops:
            operand.expr = _compared(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, SLICE)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _compared(node.key)  # it is hashed
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _compared(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, DEEP)


def _tick(body: list[nodes.Node]) -> nodes.Node:
    weight = 1 + sum(map(_weight, body)) // _NODES_PER_STEP
    return nodes.ExprStmt(_filtered(nodes.Const(weight, lineno=1), TICK), lineno=1)


def _weight(node: nodes.Node) -> int:
    total, stack = 0, [node]
    while stack:
        item = stack.pop()
        data = item.data if isinstance(item, nodes.TemplateData) else ""
        total += 1 + len(data) // _CHARS_PER_STEP
        stack.extend(item.iter_child_nodes())
    return total
