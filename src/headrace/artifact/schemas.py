"""Schemas by name: a file beside an artifact's own, optional, and no part of its identity.

`schemas.json` holds the artifact that they were checked against and, for each name, a schema's text and its SHA-256.
What a schema means is not known here: whoever stores one has compiled it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping

from headrace.artifact.container import Artifact
from headrace.artifact.jsontext import parse_object, read_bytes
from headrace.errors import FileError, InputError

SCHEMAS_NAME = "schemas.json"
VERSION = 1
MAX_SCHEMAS = 256
MAX_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_schemas(artifact: Artifact) -> dict[str, str]:
    """The texts of an artifact's schemas by name. Raises FileError for a file that is damaged or another artifact's."""
    path = artifact.path / SCHEMAS_NAME
    if not path.exists():
        return {}
    found = parse_object(path, "file", read_bytes(path, MAX_BYTES), MAX_BYTES)
    if found.get("version") != VERSION:
        raise FileError(path, "version", f"is not {VERSION}")
    if found.get("identity") != artifact.identity:
        raise FileError(path, "identity", "was made for another artifact; remove it")
    stored = found.get("schemas")
    if not isinstance(stored, dict) or len(stored) > MAX_SCHEMAS or len(found) != 3:
        raise FileError(path, "schemas", f"is not an object of at most {MAX_SCHEMAS} schemas")
    for name, entry in stored.items():
        _check_entry(artifact, name, entry)
    return {name: entry["text"] for name, entry in stored.items()}


def _check_entry(artifact: Artifact, name: str, entry: object) -> None:
    path = artifact.path / SCHEMAS_NAME
    if not _NAME.fullmatch(name):
        raise FileError(path, f"schema {name!r:.80}", "is not a name")
    if not isinstance(entry, dict) or set(entry) != {"text", "sha256"}:
        raise FileError(path, f"schema {name!r}", "is not a text with its hash")
    if not isinstance(entry["text"], str) or entry["sha256"] != _digest(entry["text"]):
        raise FileError(path, f"schema {name!r}", "does not match its hash")


def find_schema(artifact: Artifact, name: str) -> str:
    """The text of one schema. Raises InputError where there is none of that name."""
    stored = read_schemas(artifact)
    if name not in stored:
        known = ", ".join(stored) or "none"
        raise InputError(
            f"the model has no schema {name!r:.80}; it has: {known}",
            hint="headrace schema add stores one",
        )
    return stored[name]


def write_schemas(artifact: Artifact, schemas: Mapping[str, str]) -> None:
    """Replace the schemas of an artifact; without any, remove the file. Raises FileError or InputError."""
    path = artifact.path / SCHEMAS_NAME
    for name in schemas:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r:.80} is no name: up to 64 letters, digits, dots, - and _")
    if len(schemas) > MAX_SCHEMAS:
        raise InputError(f"a model has at most {MAX_SCHEMAS} schemas")
    entries = {n: {"sha256": _digest(t), "text": t} for n, t in sorted(schemas.items())}
    body = {"version": VERSION, "identity": artifact.identity, "schemas": entries}
    text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise InputError(f"the schemas of a model have at most {MAX_BYTES:,} bytes together")
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not schemas:
            path.unlink(missing_ok=True)
            return
        work.write_text(text, "utf-8")
        work.replace(path)
    except OSError as error:
        raise FileError(path, "write", error.strerror or str(error)) from None
    finally:
        work.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
