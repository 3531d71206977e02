"""`headrace schema`: the schemas that a model carries by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headrace import locate
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.jsontext import read_bytes
from headrace.artifact.schemas import find_schema, read_schemas, write_schemas
from headrace.cli import progress
from headrace.errors import FileError, InputError
from headrace.text.tokenizer import Tokenizer

MAX_FILE_BYTES = 2 << 20


def schema(
    action: Literal["add", "list", "remove"],
    model: str,
    name: str | None = None,
    file: Path | None = None,
) -> int:
    """Add a JSON Schema to a model under a name, list those that it has, or remove one.

    `headrace run --json-schema @NAME` and `LLM.generate(schema="@NAME")` use it. A schema is compiled before it is
    stored, so one that cannot be followed is refused here.

    Parameters
    ----------
    action
        What to do.
    model
        A name, an artifact, a GGUF file or a model directory.
    name
        Of the schema: up to 64 letters, digits, dots, hyphens and underscores.
    file
        The schema to add.
    """
    if (name is None) != (action == "list") or (file is None) != (action != "add"):
        raise InputError(
            "it is: schema add MODEL NAME FILE, schema list MODEL, or schema remove MODEL NAME"
        )
    with progress.shown() as report:
        artifact = open_artifact(locate.locate(model, progress=report))
    stored = read_schemas(artifact)
    if name is None:
        for each, text in stored.items():
            print(f"{each}  {len(text):,} characters")
    elif file is None:
        find_schema(artifact, name)
        write_schemas(artifact, {n: t for n, t in stored.items() if n != name})
    else:
        write_schemas(artifact, stored | {name: _compiled(artifact, file)})
    return 0


def _compiled(artifact: Artifact, file: Path) -> str:
    """The canonical text of a schema's file. Raises FileError or GrammarError."""
    from headrace.text.grammar import GrammarCompiler  # its library takes time to import

    info = artifact.manifest.tokenizer
    tokenizer = Tokenizer.from_file(artifact.tokenizer_path, bos=info.bos, eos=info.end)
    try:
        text = read_bytes(file, MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(file, f"byte {error.start}", "is not UTF-8") from None
    return GrammarCompiler(tokenizer).schema(text).text
