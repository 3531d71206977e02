"""The type stub of the native module says what the built module says of itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import headrace.kernels

STUB = Path(headrace.kernels.__file__).with_name("_native.pyi")
Signature = list[str]  # each parameter with its type, then the result


def signature(node: ast.FunctionDef, aliases: dict[str, str]) -> Signature:
    """Names of positional-only parameters are left out: the module has none for them."""

    def kind(annotation: ast.expr | None) -> str:
        text = "" if annotation is None else ast.unparse(annotation)
        return re.sub(r"\w+", lambda word: aliases.get(word[0], word[0]), text)

    only = [kind(a.annotation) for a in node.args.posonlyargs if a.arg != "self"]
    named = [f"{a.arg}: {kind(a.annotation)}" for a in node.args.args if a.arg != "self"]
    return [*only, *named, kind(node.returns)]


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{node.name}.")


def of_stub() -> dict[str, Signature]:
    tree = ast.parse(STUB.read_text("utf-8"))
    aliases = {
        n.target.id: ast.unparse(n.value).replace("np.", "")
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value
    }
    return {name: signature(node, aliases) for name, node in functions(tree.body)}


def of_module(module: Any) -> dict[str, Signature]:
    found = {}
    classes = {f"{name}.": kind for name, kind in vars(module).items() if isinstance(kind, type)}
    for prefix, owner in {"": module, **classes}.items():
        for name in vars(owner):
            for text, *_ in getattr(getattr(owner, name), "__nb_signature__", ()):
                plain = re.sub(r"(?:numpy\.)?ndarray\[dtype=(\w+)[^\]]*\]", r"NDArray[\1]", text)
                plain = plain.replace("collections.abc.", "")
                (node,) = ast.parse(f"{plain}: ...").body
                assert isinstance(node, ast.FunctionDef)
                found[prefix + name] = signature(node, {})
    return found


def test_the_stub_is_the_module() -> None:
    try:
        module = import_module("headrace.kernels._native")
    except ImportError:
        pytest.skip("the native module was not built")
    built = of_module(module)
    assert {"tiers", "op_project", "Runner.run", "Runner.__init__", "Lanes.wait"} <= built.keys()
    assert of_stub() == built
