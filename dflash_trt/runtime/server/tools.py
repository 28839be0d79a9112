# SPDX-License-Identifier: Apache-2.0
"""Tools that a chat may call: their definitions, and the grammar of a required call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.structural_tags import PLACE
from dflash_trt.runtime.server.channels import ChannelTokens
from dflash_trt.runtime.server.hermes import BEGIN, END
from dflash_trt.runtime.server.request_fields import TOOL_CHOICES, ChatBody
from dflash_trt.runtime.server.tagged_calls import TAGS, TaggedFormat, tagged_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
NAME = r"[a-zA-Z0-9_-]{1,64}"
"""Names of functions, as in the OpenAI API."""
ToolFormat = ChannelTokens | Literal["hermes"] | TaggedFormat
"""How a chat template writes calls: in harmony, with these control tokens, as Hermes does, or in its tags."""


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that a request may call."""

    definitions: list[Json]
    required: bool
    """Whether at least one must be called."""
    parallel: bool
    """Whether several may be called."""


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """The format of the chat template's calls; None for an unknown one."""
    if (tokens := ChannelTokens.read(tokenizer)) is not None:
        return tokens
    template = str(tokenizer.chat_template or "")
    token = tokenizer.get_added_vocab().get(BEGIN)
    is_text = token is None or not tokenizer.added_tokens_decoder[token].special
    if BEGIN not in template or not is_text:
        return None
    return tagged_format(template) or "hermes"


def read_tools(body: ChatBody) -> Tools | None:
    """The tools of a chat, None if it may call none; RequestError, with the field's name, for invalid ones."""
    definitions, choice = body.tools, body.tool_choice
    names = [_name(definition) for definition in definitions]
    named = None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        named = choice["function"].get("name")
    if named is None and choice not in TOOL_CHOICES:
        raise RequestError(f"tool_choice: expected none, auto, required or a function, found {shown(choice)}")
    if (named is not None and named not in names) or (choice == "required" and not names):
        raise RequestError(f"tool_choice: expected one of tools, found {shown(named or choice)}")
    if named is not None:
        return Tools(definitions=[definitions[names.index(named)]], required=True, parallel=False)
    if not definitions or choice == "none":
        return None
    return Tools(definitions=definitions, required=choice == "required", parallel=body.parallel_tool_calls)


def _name(definition: Json) -> str:
    function = definition.get("function")
    if not isinstance(function, dict) or definition.get("type") != "function":
        raise RequestError(f'tools: expected {{"type": "function", "function": {{...}}}}, found {shown(definition)}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise RequestError(f"tools: expected names of 1 to 64 letters, digits, _ and -, found {shown(name)}")
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        raise RequestError(f"tools: expected parameters as the JSON schema of an object, found {shown(parameters)}")
    return name


def call_grammar(tools: Tools, form: ToolFormat) -> Grammar:
    """Grammar of an answer that calls at least one tool; RequestError for a format without one."""
    if form in TAGS:
        raise RequestError(
            f"tool_choice: calls in {form}'s format cannot be required",
            hint="use auto, which parses the target's calls",
        )
    functions = [definition["function"] for definition in tools.definitions]
    names = [function["name"] for function in functions]
    arguments = [
        {
            "type": "json_schema",
            "json_schema": {"type": "object", **(function.get("parameters") or {})},
            PLACE: f"parameters of {function['name']}",
        }
        for function in functions
    ]
    if isinstance(form, ChannelTokens):
        calls = [_harmony_call(form, *call) for call in zip(names, arguments, strict=True)]
        whole: Json = {"type": "or", "elements": calls}
    else:
        begins = [f'{BEGIN}\n{{"name": "{name}", "arguments": ' for name in names]
        tags = [
            {"type": "tag", "begin": begin, "content": schema, "end": f"}}\n{END}"}
            for begin, schema in zip(begins, arguments, strict=True)
        ]
        whole = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        whole["stop_after_first"] = not tools.parallel
    tag = {"type": "structural_tag", "format": whole}
    return Grammar(kind="structural_tag", text=msgspec.json.encode(tag).decode(), field="tools")


def _harmony_call(form: ChannelTokens, name: str, arguments: Json) -> Json:
    """The message of one call, whose end also ends the answer."""
    header = [
        {"type": "token", "token": form.channel},
        {"type": "const_string", "value": f"commentary to=functions.{name} json"},
        {"type": "token", "token": form.message},
    ]
    return {"type": "sequence", "elements": [*header, arguments]}
