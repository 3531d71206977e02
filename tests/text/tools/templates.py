"""Chat templates of the shapes that families publish, as short as shows what each demands."""

from __future__ import annotations

# SmolLM2: no tools; content is put together with +, so that it has to be text.
PLAIN = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen 2.5 and 3, Hermes.
HERMES = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}
<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
</tools> <tool_call> {"name": <function-name>, "arguments": <args-json-object>} </tool_call><|im_end|>
{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if m.reasoning_content is string %}{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{%- set c = c.function %}{{ '\n<tool_call>\n{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen3-Coder, Qwen3.5: arguments are taken apart, a system message stands in front or nowhere.
QWEN_XML = """{%- for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}
{%- if tools %}{% for t in tools %}{{ t.function.name }}{% for name, p in t.function.parameters.properties | items %}{{ name }}{% endfor %}{% endfor %}
<tool_call> <function=example> <parameter=one> </parameter> </function> </tool_call>{% endif %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{%- set c = c.function %}{{ '\n<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments | items %}{{ '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

# Llama 3.1: one call a message.
LLAMA = """{{- bos_token }}{% set first = messages[1:] if messages[0].role == 'system' else messages %}{% if tools is not none and first | length == 0 %}{{ raise_exception("Cannot put tools in the first user message when there's no first user message!") }}{% endif %}{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ '{"name": function name, "parameters": dictionary of argument name and its value}' }}{% endif %}
{%- for m in messages %}
{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set c = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Mistral: users and assistants alternate, ids have nine letters.
MISTRAL = """{{- bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- set ns = namespace(i=0) %}{% for m in loop_messages %}{% if m.role != 'tool' and not m.get('tool_calls') %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('conversation roles must alternate user/assistant') }}{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""

MISTRAL_ARGS = MISTRAL.replace("'[TOOL_CALLS] ['", "''").replace("""{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}""", """{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}""")  # fmt: skip

# gpt-oss: one call a message, thinking under its own name and not beside content.
HARMONY = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- set c = m.tool_calls[0].function %}{% set ns.last = c.name %}{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}{{ c.arguments | tojson }}{{ '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}{% if not ns.last %}{{ raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{% endif %}{{ '<|start|>functions.' + ns.last + ' to=assistant<|channel|>commentary<|message|>' }}{{ m.content | tojson }}{{ '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
HARMONY = (
    "{%- set ns = namespace(last=none) %}{% if tools %}{% for t in tools %}{{ t.function.name }}{% for p in t.function.parameters.properties %}{{ p }}{% endfor %}{% endfor %}{% endif %}"
    + HARMONY
)

ALL = {"plain": PLAIN, "hermes": HERMES, "qwen-xml": QWEN_XML, "llama": LLAMA, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS, "harmony": HARMONY}  # fmt: skip
