"""docs/clients.md: what is to be pasted can be read by what it is pasted into, and names what there is."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:11434"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_settings_in_json_are_json() -> None:
    (zed,) = [json.loads(block) for block in blocks("json")]
    provider = zed["language_models"]["openai_compatible"]["headrace"]
    assert provider["api_url"] == f"{ADDRESS}/v1"
    assert [model["name"] for model in provider["available_models"]] == ["smollm2:135m"]


def test_programs_are_programs_and_ask_this_server() -> None:
    found = blocks("python")
    assert len(found) == 2
    for block in found:
        texts = {
            node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)
        }
        assert {f"{ADDRESS}/v1", "smollm2:135m", "unused", 600} <= texts


def test_every_address_is_this_servers_or_a_document() -> None:
    found = set(re.findall(r"http://[\w.:-]+(?:/v1)?", PAGE))
    assert found == {
        ADDRESS,
        f"{ADDRESS}/v1",
        "http://host.docker.internal:11434/v1",
    }
