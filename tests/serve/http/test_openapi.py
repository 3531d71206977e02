"""The published description says what the server does: requests made from it, right and wrong ones, meet no surprise."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

import headrace.serve.dialects
from headrace.serve.app import create_app
from headrace.serve.events import Finished, Started, TextDelta, Usage
from headrace.serve.http.guard import Policy
from serve.http.plain import plain
from serve.http.wired import asked, request, wired
from serve.scripted import ScriptedBackend

SCRIPT = [Started(3, 0), TextDelta("Hello"), Finished("stop", Usage(3, 0, 1))]


def no_failure(_context: Any, response: Any, _case: Any) -> None:
    """No 5xx but the one that refuses what the server never does."""
    assert response.status_code < 500 or response.status_code == 501, response.text


CHECKS = [
    no_failure,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
EXAMPLES = 10  # of an operation in a mode

load_all_checks()


def dialects() -> list[Any]:
    """The plain one, and every real one."""
    found = pkgutil.iter_modules(headrace.serve.dialects.__path__)
    modules = [importlib.import_module(f"headrace.serve.dialects.{info.name}") for info in found]
    return [plain(), *(module for module in modules if hasattr(module, "ENDPOINTS"))]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with wired(create_app(ScriptedBackend(SCRIPT), dialects())) as port:
        yield port


def test_the_description_is_whole(port: int) -> None:
    got = asked(port, request("GET", "/openapi.json"))
    text = got.json
    assert text["openapi"] == "3.1.0"
    ask = text["paths"]["/plain/ask"]["post"]
    assert ask["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/plain.Ask"
    }
    assert set(ask["responses"]) >= {
        "200",
        "400",
        "403",
        "404",
        "408",
        "411",
        "413",
        "415",
        "431",
        "500",
        "503",
    }
    assert text["paths"]["/plain/things/{id}"]["get"]["parameters"][0]["name"] == "id"
    limit = text["components"]["schemas"]["plain.Ask"]["properties"]["limit"]
    assert limit["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 100}
    assert "/health" in text["paths"]
    for schema in text["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_operation_has_its_own_name(port: int) -> None:
    paths = asked(port, request("GET", "/openapi.json")).json["paths"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(set(names)) == len(names)


def test_a_key_is_described_where_one_is_needed() -> None:
    app = create_app(ScriptedBackend(SCRIPT), [plain()], policy=Policy((), "key"))
    with wired(app) as port:
        text = asked(port, request("GET", "/openapi.json", b"", "x-api-key: key")).json
    assert text["paths"]["/plain/ask"]["post"]["security"] == [{"bearer": []}]
    assert text["paths"]["/health"]["get"]["security"] == []
    assert "401" in text["paths"]["/plain/ask"]["post"]["responses"]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_requests_made_from_the_description_meet_no_surprise(port: int, mode: Any) -> None:
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    seen = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is MODES[1] and not len(operation.body):
            continue  # any path is a right one

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def meets(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=20)

        meets()
        seen += 1
    assert seen >= 3
