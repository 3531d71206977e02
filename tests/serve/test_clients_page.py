"""docs/clients.md: what is to be pasted can be read by what it is pasted into, and names what there is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path

from headrace.serve.dialects import gateway

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


def test_settings_in_toml_are_toml() -> None:
    (codex,) = [tomllib.loads(block) for block in blocks("toml")]
    provider = codex["model_providers"][codex["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{ADDRESS}/v1", "responses")
    assert codex["model_auto_compact_token_limit"] < codex["model_context_window"]


def test_shell_scripts_are_read_by_a_shell() -> None:
    found = blocks("sh")
    assert len(found) == 4
    for block in found:
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
        assert ADDRESS in block
    (profile,) = re.findall(r"<<'JSON'\n(.*?)^JSON", "\n".join(found), re.M | re.S)
    assert json.loads(profile)["models"] == {"gateway": "headrace/smollm2:135m"}


def test_every_path_of_the_gateway_is_served() -> None:
    paths = {endpoint.path for endpoint in gateway.ENDPOINTS}
    named = set(re.findall(r"11434(/v\d/ai(?:/[\w-]+)?)", PAGE))
    assert named == {"/v4/ai", "/v3/ai/language-model"}
    assert all(any(path.startswith(name) for path in paths) for name in named)


def test_every_address_is_this_servers_or_a_document() -> None:
    found = set(re.findall(r"http://[\w.:-]+(?:/v1)?", PAGE))
    assert found == {
        ADDRESS,
        f"{ADDRESS}/v1",
        "http://host.docker.internal:11434/v1",
    }
