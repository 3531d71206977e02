"""docs/clients.md: what is to be pasted can be read by what it is pasted into, and names what there is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path

from headrace.cli.serve import PREFILL_MINUTES
from headrace.serve.dialects import gateway
from headrace.serve.dialects.openai_chat_wire import ChatBody
from headrace.serve.validation import read

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:11434"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_settings_in_json_are_json() -> None:
    zed, _, _ = [json.loads(block) for block in blocks("json")]
    provider = zed["language_models"]["openai_compatible"]["headrace"]
    assert provider["api_url"] == f"{ADDRESS}/v1"
    assert [model["name"] for model in provider["available_models"]] == ["smollm2:135m"]


def test_settings_of_agents_name_one_model_and_this_server() -> None:
    """For titles and summaries too, with an answer that leaves room in the window."""
    _, pi, opencode = [json.loads(block) for block in blocks("json")]
    provider = pi["providers"]["headrace"]
    (model,) = provider["models"]
    assert (provider["baseUrl"], provider["api"]) == (f"{ADDRESS}/v1", "openai-completions")
    assert (model["id"], model["input"]) == ("smollm2:135m", ["text"])
    assert model["maxTokens"] < model["contextWindow"] == 65536
    assert opencode["model"] == opencode["small_model"] == "headrace/smollm2:135m"
    provider = opencode["provider"]["headrace"]
    assert provider["options"]["baseURL"] == f"{ADDRESS}/v1"
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["models"]["smollm2:135m"]["limit"] == {"context": 65536, "output": 8192}


def test_the_further_bodies_of_hermes_are_fields_of_chat_completions() -> None:
    """Every task beside the conversation stays here; each timeout is as long as the server's own."""
    _, hermes = blocks("yaml")
    assert (
        f"    base_url: {ADDRESS}/v1\n    api_key: unused\n    api_mode: chat_completions\n"
        in hermes
    )
    assert {float(seconds) for seconds in re.findall(r"timeout: (\d+)", hermes)} == {
        PREFILL_MINUTES * 60
    }
    bodies = re.findall(r"^( +)extra_body:\n((?:\1 +.*\n)+)", hermes, re.M)
    assert len(bodies) == 3
    for _, body in bodies:
        fields = dict(line.split(": ") for line in map(str.strip, body.splitlines()))
        assert "max_tokens" in fields
        read(
            ChatBody,
            {"model": "m", "messages": [], **{k: json.loads(v) for k, v in fields.items()}},
        )
    _, _, tasks = hermes.partition("auxiliary:\n")
    named = re.findall(r"^  (\w+):(?: \{|\n    )provider: main\b", tasks, re.M)
    assert named == re.findall(r"^  (\w+):(?! true)", tasks, re.M)
    assert "approval" in named


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
