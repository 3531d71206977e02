"""The floors of docs/architecture.md: imports go down only, and what is absent stays absent."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "headrace"
FLOORS = [
    {"errors", "signals"}, {"values", "config"}, {"arith"}, {"kernels"}, {"models", "text"}, {"artifact"}, {"memory", "experts"}, {"engine", "completion"},
    {"options", "prompt", "drafting", "heads", "stream", "embed"}, {"phases"}, {"locate"}, {"adapters"}, {"loading"}, {"llm"}, {"serve"}, {"cli", "__init__"}, {"entry"}, {"__main__"},
]  # fmt: skip
LEVEL = {name: i for i, names in enumerate(FLOORS) for name in names}
TOKEN_PATH = ["arith/ops.py", "arith/philox.py", "arith/sampling.py", "arith/damping.py", "kernels/reference.py", "kernels/native.py", "kernels/layout.py", "engine/engine.py", "engine/batch.py", "engine/generation.py", "engine/sequence.py", "engine/pages.py", "engine/mixture.py", "engine/damped.py", "engine/schedule.py", "engine/scheduler.py", "engine/turns.py", "embed/prefill.py", "embed/decode.py", "embed/timeline.py", "embed/workspace.py", "embed/saving.py"]  # fmt: skip


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def floor(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """First-level parts of headrace that a file imports."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "headrace"
        ):
            parts = node.module.split(".")
            out |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names if a.name in LEVEL}
        elif isinstance(node, ast.Import):
            out |= {a.name.split(".")[1] for a in node.names if a.name.startswith("headrace.")}
    return out


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    own = floor(path)
    for name in imported(path):
        assert LEVEL[name] < LEVEL[own] or name == own, f"{own} imports {name}"


def test_memory_plans_from_facts_alone() -> None:
    """It reads manifests and shapes; weights, engine and commands are not its business."""
    allowed = {"values", "errors", "config", "artifact", "kernels", "models", "memory"}
    modules = {
        node.module
        for path in files()
        if floor(path) == "memory"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace.")
    }
    assert {m.split(".")[1] for m in modules} <= allowed
    assert {m for m in modules if m.startswith("headrace.kernels")} == {"headrace.kernels.program"}


def test_only_config_reads_the_environment() -> None:
    readers = [p for p in files() if re.search(r"os\.environ|os\.getenv", p.read_text())]
    assert [floor(p) for p in readers] == ["config"]


def test_only_kernels_knows_the_processor() -> None:
    words = re.compile(r"cpuinfo|platform\.machine|cpu_supports|immintrin")
    assert {floor(p) for p in files() if words.search(p.read_text())} <= {"kernels"}


@pytest.mark.parametrize("name", TOKEN_PATH)
def test_no_float_on_the_token_path(name: str) -> None:
    """No float dtype, literal or true division where tokens are computed."""
    tree = ast.parse((SOURCE / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith(("float", "double", "half")), ast.unparse(node)
        if isinstance(node, ast.Constant):
            assert not isinstance(node.value, float) or "time" in name or node.value == 0.0, (
                node.value
            )
        if isinstance(node, ast.BinOp):
            assert not isinstance(node.op, ast.Div), ast.unparse(node)


def test_no_float_in_the_native_operations() -> None:
    """No float type and no float instruction; shuffles that only move bits are not arithmetic."""
    arithmetic = r"_(add|sub|mul|div|fn?m|sqrt|rcp|rsqrt|cvt|max|min|round)[a-z0-9]*_(p|s)[sdh]\b"
    native = SOURCE.parent / "native"
    for path in sorted(native.iterdir()):
        if path.suffix in (".cpp", ".h", ".inl") and path.name != "pool.cpp":
            code = re.sub(r"//.*", "", path.read_text())
            assert not re.search(rf"\b(float|double|_Float16)\b|{arithmetic}", code), path.name


def test_no_module_global_is_rebound() -> None:
    for path in files():
        assert not [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Global)
        ], path


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name cannot be collected in one run."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def modules(path: Path) -> set[str]:
    """Every module that a file imports, in full, with the names behind `from`."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            out |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return out


def test_the_rooms_of_serve_go_down() -> None:
    """A room imports rooms below it: what a request means, then how it comes and is answered, then the process."""
    below: dict[str, set[str]] = {
        "dialects": set(), "model": set(), "telemetry": set(), "http": {"telemetry"},
        "app": {"http", "telemetry"}, "process": {"app", "http", "telemetry", "dialects"},
    }  # fmt: skip
    serve = SOURCE / "serve"
    for path in sorted(serve.rglob("*.py")):
        room = path.relative_to(serve).parts[0].removesuffix(".py")
        parts = {tuple(name.split(".")[:3]) for name in modules(path)}
        rooms = {part[2] for part in parts if part[:2] == ("headrace", "serve") and len(part) > 2}
        assert rooms & set(below) <= below.get(room, set()) | {room}, path


def test_only_serve_knows_http() -> None:
    """Nothing else imports a part of a server; only commands, above it, import serve."""
    server = {"starlette", "uvicorn", "h11", "anyio", "asyncio", "http", "pydantic"}
    for path in files():
        if floor(path) != "serve":
            found = {name for name in modules(path) if name.split(".")[0] in server}
            assert not found, f"{path} imports {found}"
    above = {floor(p) for p in files() if "serve" in imported(p)} - {"serve"}
    assert above <= {"cli"}


def test_dialects_only_translate() -> None:
    """No engine, clock, chance or server in a dialect, and none of another dialect's modules."""
    folder = SOURCE / "serve" / "dialects"
    named = {"openai_chat", "openai_responses", "anthropic", "ollama", "gateway"}
    banned = {"time", "random", "secrets", "uuid", "asyncio", "threading", "starlette", "uvicorn"}
    for path in sorted(folder.glob("[a-z]*.py")):
        own = next(name for name in named if path.stem.startswith(name))
        found = modules(path)
        assert not {name.split(".")[0] for name in found} & banned, path
        assert imported(path) <= {"serve", "values"}, path
        others = named - {own}
        assert not [name for name in found if name.split(".")[-1].startswith(tuple(others))], path
