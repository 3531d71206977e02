"""The published description, OpenAPI 3.1, from the dialects' endpoints and wire types. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from headrace.serve.dialect import EVENT_STREAM, LINES, Count, Endpoint, ErrorBody, Generate, Page
from headrace.serve.events import Failure
from headrace.serve.http.routes import plain_error
from headrace.serve.request import Json
from headrace.serve.validation import Wire

# What any endpoint may answer besides its own; the server itself has most of them.
_FAILURES = {
    400: "malformed", 403: "a foreign Host or Origin", 404: "not here", 408: "sent too slowly", 409: "another model's",
    411: "a chunked body", 413: "too large", 415: "not JSON", 417: "an unknown expectation", 422: "cannot be generated",
    431: "too large a head", 500: "failed", 501: "not offered", 503: "busy, or not enough memory", 507: "no room",
}  # fmt: skip


def described(
    dialects: Sequence[ModuleType], own: Sequence[Endpoint], version: str, with_key: bool
) -> Json:
    """The description of a server of these dialects and of its `own` endpoints."""
    paths: dict[str, dict[str, Json]] = {}
    schemas: dict[str, Json] = {}
    for dialect in dialects:
        name = dialect.__name__.rpartition(".")[2]
        for endpoint in dialect.ENDPOINTS:
            place = paths.setdefault(_path(endpoint.path), {})
            place[endpoint.method.lower()] = _operation(
                endpoint, name, dialect.error, schemas, with_key
            )
    for endpoint in own:
        place = paths.setdefault(_path(endpoint.path), {})
        place[endpoint.method.lower()] = _operation(
            endpoint, "server", plain_error, schemas, with_key
        )
    keys: Json = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": version or "0"},
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": keys} if with_key else {})},
    }


def _operation(
    endpoint: Endpoint, tag: str, error: ErrorBody, schemas: dict[str, Json], with_key: bool
) -> Json:
    statuses = _FAILURES | ({401: "no valid API key"} if with_key else {})
    kinds = [endpoint.media_type if isinstance(endpoint, Page) else "application/json"]
    kinds += [EVENT_STREAM, LINES] if isinstance(endpoint, Generate) else []
    whole = {"description": "done", "content": {kind: _any(kind) for kind in kinds}}
    out: Json = {
        "tags": [tag],
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_"),
        "responses": {"200": whole}
        | {str(s): _failed(s, about, error) for s, about in sorted(statuses.items())},
    }
    if isinstance(endpoint, Generate | Count):
        out["summary"] = "Counts tokens" if isinstance(endpoint, Count) else "Generates"
    if names := re.findall(r"\{(\w+)(?::path)?\}", endpoint.path):
        out["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.body is not None:
        schema = {"schema": _schema(endpoint.body, tag, schemas)}
        out["requestBody"] = {"required": True, "content": {"application/json": schema}}
    if with_key:
        out["security"] = [{"bearer": []}] if endpoint.path != "/health" else []
    return out


def _any(kind: str) -> Json:
    return {"schema": {"type": "object" if kind == "application/json" else "string"}}


def _failed(status: int, about: str, error: ErrorBody) -> Json:
    example = error(Failure(status, "code", "message"))
    content = {"schema": {"type": "object"}, "example": example}
    return {"description": about, "content": {"application/json": content}}


def _schema(kind: type[Wire], tag: str, schemas: dict[str, Json]) -> Json:
    """A reference to a wire type, which is put into `schemas` with all that it refers to, named by its dialect."""
    whole = kind.model_json_schema(ref_template=f"#/components/schemas/{tag}.{{model}}")
    for name, below in whole.pop("$defs", {}).items():
        schemas[f"{tag}.{name}"] = _plain(below)
    name = f"{tag}.{kind.__name__}"
    if "$ref" not in whole:  # else it refers to itself and is there already
        schemas[name] = _plain(whole)
    return {"$ref": f"#/components/schemas/{name}"}


def _plain(schema: Any) -> Json:
    """A schema as JSON has it."""
    plain: Json = json.loads(json.dumps(schema, default=str))
    return plain


def _path(path: str) -> str:
    return path.replace(":path}", "}")
