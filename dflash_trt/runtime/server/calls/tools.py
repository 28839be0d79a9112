# SPDX-License-Identifier: Apache-2.0
"""Tools that a chat may call: their definitions, and the grammar of calls that are required or strict."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.compiler import MAX_CHARACTERS, TOOLS
from dflash_trt.runtime.grammars.structural_tags import PLACE
from dflash_trt.runtime.server.calls.channels import ChannelTokens
from dflash_trt.runtime.server.calls.deepseek import TAGS as DEEPSEEK
from dflash_trt.runtime.server.calls.deepseek import DeepSeekFormat
from dflash_trt.runtime.server.calls.hermes import BEGIN, END, HermesParser
from dflash_trt.runtime.server.calls.tagged_calls import (
    TAGS,
    TaggedFormat,
    call_reader,
    const_text,
    sequence,
    tagged_call,
    tagged_format,
)
from dflash_trt.runtime.server.request.request_fields import TOOL_CHOICES, ChatBody

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
NAME = r"[a-zA-Z0-9_-]{1,64}"
"""Names of functions, as in the OpenAI API."""
AUTO: Json = {"type": "triggered_tags", "triggers": [BEGIN]}
"""Free text, and calls in it."""
ToolFormat = ChannelTokens | DeepSeekFormat | Literal["hermes", "dsml"] | TaggedFormat
"""How a chat template writes calls: in harmony, with these control tokens, as DeepSeek or Hermes does, or in tags."""
DSML = "｜DSML｜"
"""Begins the tags of DeepSeek-V3.2's and V4's calls."""


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
    if DSML in template:
        return "dsml"
    if DEEPSEEK.begin in template:
        return DeepSeekFormat.read(tokenizer) if _is_text(tokenizer, DEEPSEEK.begin) else None
    if BEGIN not in template or not _is_text(tokenizer, BEGIN):
        return None
    return tagged_format(template) or "hermes"


def _is_text(tokenizer: PreTrainedTokenizerBase, tag: str) -> bool:
    """Whether a tag is visible in an answer's text."""
    token = tokenizer.get_added_vocab().get(tag)
    return token is None or not tokenizer.added_tokens_decoder[token].special


def call_parser(form: ToolFormat | None, definitions: list[Json]) -> HermesParser:
    """Parser of an answer whose calls are text."""
    if isinstance(form, DeepSeekFormat):
        return HermesParser(form.read_call, DEEPSEEK)
    return HermesParser(call_reader(form, definitions))


def read_tools(body: ChatBody) -> Tools | None:
    """The tools of a chat, None if it may call none; RequestError, with the field's name, for invalid ones."""
    definitions, choice = body.tools, body.tool_choice
    names = [_name(definition) for definition in definitions]
    named = None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        named = choice["function"].get("name")
    if named is None and choice not in TOOL_CHOICES:
        raise RequestError(f"tool_choice: it is none of {', '.join(TOOL_CHOICES)} and no function: {shown(choice)}")
    if (named is not None and named not in names) or (choice == "required" and not names):
        raise RequestError(f"tool_choice: {shown(named or choice)}, but tools has {'no such one' if named else 'none'}")
    if named is not None:
        return Tools(definitions=[definitions[names.index(named)]], required=True, parallel=False)
    if not definitions or choice == "none":
        return None
    return Tools(definitions=definitions, required=choice == "required", parallel=body.parallel_tool_calls)


def _name(definition: Json) -> str:
    function = definition.get("function")
    if not isinstance(function, dict) or definition.get("type") != "function":
        raise RequestError(f"tools: only functions are supported, not {shown(definition)}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise RequestError(f"tools: a name has 1 to 64 letters, digits, _ and -, unlike {shown(name)}")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"tools: strict of {name} is neither true nor false, but {shown(function['strict'])}")
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        raise RequestError(f"tools: parameters of {name} are no JSON schema of an object: {shown(parameters)}")
    return name


def call_grammar(tools: Tools, form: ToolFormat) -> Grammar | None:
    """Grammar of an answer whose calls match their schemas: of all tools if one must be called, else of strict ones.

    None where nothing is to be enforced. Raises RequestError for a schema that cannot be.
    """
    functions = [definition["function"] for definition in tools.definitions]
    if not tools.required and not any(function.get("strict") for function in functions):
        return None
    if (size := len(msgspec.json.encode(functions))) > MAX_CHARACTERS:
        raise RequestError(f"tools: {size} characters to be enforced are more than {MAX_CHARACTERS}")
    if isinstance(form, DeepSeekFormat):
        schemas = {f["name"]: _schema(f, is_enforced=tools.required or bool(f.get("strict"))) for f in functions}
        return _grammar(form.grammar(schemas, required=tools.required, parallel=tools.parallel))
    calls = [
        _call(form, function, is_enforced=tools.required or bool(function.get("strict"))) for function in functions
    ]
    if isinstance(form, ChannelTokens):
        one_call: Json = {"type": "or", "elements": calls}
        whole = one_call if tools.required else _harmony_answer(form, one_call)
    else:
        whole = {"tags": calls, "at_least_one": tools.required, "stop_after_first": not tools.parallel}
        whole |= {"type": "tags_with_separator", "separator": "\n"} if tools.required else AUTO
    return _grammar(whole)


def _grammar(whole: Json) -> Grammar:
    tag = {"type": "structural_tag", "format": whole}
    return Grammar(kind="structural_tag", text=msgspec.json.encode(tag).decode(), field=TOOLS)


def _schema(function: Json, *, is_enforced: bool) -> Json:
    """The schema of a function's arguments; any object unless `is_enforced`."""
    return {"type": "object", **((function.get("parameters") or {}) if is_enforced else {})}


def _call(form: ToolFormat, function: Json, *, is_enforced: bool) -> Json:
    """The tag of a function's call; its arguments are any object unless `is_enforced`."""
    name = function["name"]
    if form in TAGS:
        return tagged_call(form, name, (function.get("parameters") or {}) if is_enforced else None)
    schema = _schema(function, is_enforced=is_enforced)
    content = {"type": "json_schema", "json_schema": schema, PLACE: f"parameters of {name}"}
    if isinstance(form, ChannelTokens):
        kinds = [const_text(f"commentary to=functions.{name} {kind}") for kind in ("json", "<|constrain|>json")]
        return _harmony_message(form, {"type": "or", "elements": kinds}, content)
    begin, end = f'{BEGIN}\n{{"name": "{name}", "arguments": ', f"}}\n{END}"
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _harmony_answer(form: ChannelTokens, call: Json) -> Json:
    """Text and messages of the channels, at the end maybe a `call`, whose end also ends the answer."""
    text: Json = {"type": "any_text"}
    message = _harmony_message(form, {**text, "excludes": ["to="]}, text)
    between = [_token(form.end), _token(form.start), const_text("assistant")]
    messages: Json = {"type": "star", "content": sequence(message, *between)}
    last: Json = {"type": "or", "elements": [message, call]}
    return {"type": "or", "elements": [text, sequence(text, messages, last)]}


def _harmony_message(form: ChannelTokens, header: Json, body: Json) -> Json:
    return sequence(_token(form.channel), header, _token(form.message), body)


def _token(token: int) -> Json:
    return {"type": "token", "token": token}
