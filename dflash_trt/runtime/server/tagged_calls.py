# SPDX-License-Identifier: Apache-2.0
"""Tool calls as Qwen3-Coder and GLM-4.5 write them, between Hermes's tags: arguments as tagged texts.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from dflash_trt.runtime.server.hermes import CallDelta, json_call

TaggedFormat = Literal["qwen3-coder", "glm"]


class _Tags(NamedTuple):
    """Patterns of a call and of one argument; `template` is found in the chat templates that write them."""

    template: str
    call: re.Pattern[str]
    argument: re.Pattern[str]


TAGS: dict[TaggedFormat, _Tags] = {
    "qwen3-coder": _Tags(
        "<function=",
        re.compile(r"\s*<function=([\w-]+)>(.*)</function>\s*", re.DOTALL),
        re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
    ),
    "glm": _Tags(
        "<arg_key>",
        re.compile(r"\s*([\w-]+)\s*((?:<arg_key>.*)?)", re.DOTALL),
        re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
    ),
}


def tagged_format(template: str) -> TaggedFormat | None:
    """The format of a chat template's calls, if it is one of these."""
    return next((name for name, tags in TAGS.items() if tags.template in template), None)


def call_reader(form: object, definitions: Sequence[dict[str, Any]]) -> Callable[[str], CallDelta | None]:
    """Reads the text between the tags of a call in a format; None for text that is no call."""
    tags = TAGS.get(form)  # type: ignore[call-overload]
    return json_call if tags is None else partial(_tagged_call, tags, definitions)


def _tagged_call(tags: _Tags, definitions: Sequence[dict[str, Any]], text: str) -> CallDelta | None:
    if (call := tags.call.fullmatch(text)) is None:
        return None
    name, body = call.groups()
    schema = next(
        (each["function"].get("parameters") for each in definitions if each["function"]["name"] == name), None
    )
    properties = (schema or {}).get("properties")
    types = properties if isinstance(properties, dict) else {}
    arguments, end = dict[str, object](), 0
    while end < len(body.rstrip()):
        if (argument := tags.argument.match(body, end)) is None:
            return None
        key, value = argument.groups()
        arguments[key.strip()] = _value(value, types.get(key.strip()))
        end = argument.end()
    return CallDelta(name, msgspec.json.encode(arguments).decode())


def _value(text: str, schema: object) -> object:
    """A text where the schema asks for one, or where it is no JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
