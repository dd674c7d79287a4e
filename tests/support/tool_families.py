"""Families of models that call tools: chat templates in the style of theirs, with their control tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from kvmosaic.model import LoadedModel
from support.families import build
from support.tokenizers import make_tokenizer

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call functions. Their signatures:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nReturn each call as JSON within tags:\n<tool_call>\n" }}
    {{- '{"name": <name>, "arguments": <args>}' }}
    {{- "\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""The system text, then the tools, in one message: Qwen 2.5."""

QWEN3_CODER = """\
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}
{%- for tool in tools or [] %}
    {%- if loop.first %}{{- '\n\n<tools>' }}{%- endif %}
    {%- set tool = tool.function %}
    {{- '\n<function>\n<name>' + tool.name + '</name>\n<description>' }}
    {{- tool.description | default('') ~ '</description>' }}
    {%- for name, about in tool.parameters.properties | items %}
        {{- '\n<parameter>\n<name>' ~ name ~ '</name>\n<type>' ~ about.type ~ '</type>\n</parameter>' }}
    {%- endfor %}
    {{- '\n</function>' }}
    {%- if loop.last %}
        {{- '\n</tools>\n\nCall a function like this:\n<tool_call>\n<function=name>\n<parameter=key>\nvalue' }}
        {{- '\n</parameter>' }}
        {{- '\n</function>\n</tool_call>' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\n' + value | string + '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' + date_string }}
{{- '\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
    {%- if tools and loop.first %}
        {{- 'Given the following functions, respond with {"name": function name, ' }}
        {{- '"parameters": dictionary of argument name and its value}.\n\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {%- endif %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception("single tool-calls only") }}{%- endif %}
        {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson + '}' }}
    {%- else %}{{- m.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
"""Tools in the first message of the user, and the day in the system text: Llama 3.1."""

_MISTRAL_HEAD = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- bos_token }}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\n\n' if system and loop.last else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{- raise_exception("ids of tool calls have 9 characters") }}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif m.role == 'system' %}
        {{- raise_exception('Only user and assistant roles are supported, with an initial optional system message.') }}
    {%- elif m.tool_calls %}
"""
MISTRAL = (
    _MISTRAL_HEAD
    + """\
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}
"""
)
"""Tools before the last message of the user: Mistral."""
MISTRAL_ARGS = (
    _MISTRAL_HEAD
    + """\
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}
"""
)

GRANITE = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = 'You are Granite.' %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<|start_of_role|>document {"document_id": "' + document['doc_id'] | string + '"}<|end_of_role|>\n' }}
    {{- document['text'] + '<|end_of_text|>\n' }}
{%- endfor %}
{%- for m in messages %}
    {{- '<|start_of_role|>' + m.role + '<|end_of_role|>' }}
    {%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for call in m.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {%- endfor %}{{- ']' }}
    {%- else %}{{- m.content }}{%- endif %}
    {{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""
"""System text, tools, documents, each in a turn of its own: Granite 3."""

DEEPSEEK = """\
{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content + '\n\n' }}{%- endif %}{%- endfor %}
{%- for tool in tools or [] %}{{- '### ' + tool.function.name + '\n' + tool | tojson + '\n\n' }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- elif m.role == 'assistant' and m.content is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in m.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' }}
            {{- tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜>' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
"""Arguments as texts, and calls only where the content is none: DeepSeek V3."""
DEEPSEEK31 = (
    DEEPSEEK.replace("tool['type'] + '<｜tool▁sep｜>' + ", "")
    .replace("\n```json\n", "<｜tool▁sep｜>")
    .replace("arguments'] + '\n```<", "arguments'] + '<")
)

HARMONY = """\
{{- '<|start|>system<|message|>You are a helpful assistant.<|end|><|start|>developer<|message|># Instructions\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}
{%- if tools %}{{- '\n\n# Tools\n\nnamespace functions {\n' }}
{%- for tool in tools %}
{{- '// ' ~ tool.function.description | default('') ~ '\ntype ' + tool.function.name + ' = (_: ' }}
{{- tool.function.parameters | tojson + ') => any;\n' }}{%- endfor %}{{- '} // namespace functions' }}{%- endif %}
{{- '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- elif m.tool_calls %}
        {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
        {{- '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + ('<|channel|>final' if m.role == 'assistant' else '') + '<|message|>' + m.content }}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


PLAIN = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""No tools: ChatML."""


@dataclass(frozen=True)
class ToolFamily:
    """A template, and tokens that its tokenizer has besides the usual ones."""

    template: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


_DEEPSEEK_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in "calls▁begin calls▁end call▁begin call▁end sep".split())
TOOL_FAMILIES = {
    "hermes": ToolFamily(QWEN),
    "qwen3_coder": ToolFamily(QWEN3_CODER),
    "llama3_json": ToolFamily(LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")),
    "json": ToolFamily(PLAIN),
    "mistral": ToolFamily(MISTRAL, ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")),
    "mistral_args": ToolFamily(MISTRAL_ARGS, ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]")),
    "granite": ToolFamily(GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")),
    "deepseek_v3": ToolFamily(DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>"), _DEEPSEEK_TOKENS),
    "deepseek_v31": ToolFamily(DEEPSEEK31, ("<｜User｜>", "<｜Assistant｜>"), _DEEPSEEK_TOKENS),
    "harmony": ToolFamily(
        HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
    ),
}
"""By the name of their format."""


@cache
def tool_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template and the control tokens of a family."""
    about = TOOL_FAMILIES[family]
    tokenizer = make_tokenizer(about.template)
    special = [AddedToken(text, special=True, normalized=False) for text in about.special]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in about.added])
    return tokenizer


@cache
def tool_model(family: str) -> LoadedModel:
    """A tiny model of random weights with such a tokenizer."""
    tokenizer = tool_tokenizer(family)
    module = build("llama", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=8_192)
    return LoadedModel.from_module(module, tokenizer)


def tool(name: str, description: str = "Finds things.", **properties: object) -> dict[str, object]:
    """A tool in OpenAI's shape; its properties are required, a text named query if there are none."""
    about = properties or {"query": {"type": "string", "description": "What to find."}}
    parameters = {"type": "object", "properties": about, "required": list(about)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
