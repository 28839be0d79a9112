# SPDX-License-Identifier: Apache-2.0
"""Tool calls as Qwen3-Coder and GLM-4.5 write them, between Hermes's tags: arguments as tagged texts.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from dflash_trt.runtime.server.calls.hermes import CUT, JSON, CallDelta, ReadCall, is_cut, json_call

TaggedFormat = Literal["qwen3-coder", "glm"]


class Tags(NamedTuple):
    """Patterns that read the parts of a call, and texts around them; `template` is in the templates that write it."""

    template: str
    call: re.Pattern[str]
    argument: re.Pattern[str]
    value_end: re.Pattern[str]
    before_name: str
    after_name: str
    before_key: str
    after_key: tuple[str, ...]
    """Texts between which a line may end."""
    after_value: str
    after_arguments: str
    has_lines: bool
    """Whether a line ends after the name, each value and each argument; otherwise it may."""


TAGS: dict[TaggedFormat, Tags] = {
    "qwen3-coder": Tags(
        "<function=", re.compile(r"\s*<function=([\w-]+)>"), re.compile(r"\s*<parameter=([^>]+)>\n?"),
        re.compile(r"\n?</parameter>"), "\n<function=", ">", "<parameter=", (">\n",), "</parameter>",
        "</function>\n", True,
    ),
    "glm": Tags(
        "<arg_key>", re.compile(r"\s*([\w-]+)"), re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
        re.compile(r"</arg_value>"), "", "", "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", "", False,
    ),
}  # fmt: skip


def tagged_format(template: str) -> TaggedFormat | None:
    """The format of a chat template's calls, if it is one of these."""
    return next((name for name, tags in TAGS.items() if tags.template in template), None)


def call_reader(form: object, definitions: Sequence[dict[str, Any]]) -> ReadCall:
    """Reads the text between the tags of a call in a format; None for text that is no call."""
    tags = TAGS.get(form)  # type: ignore[call-overload]
    return json_call if tags is None else partial(_tagged_call, tags, definitions)


def _tagged_call(tags: Tags, definitions: Sequence[dict[str, Any]], text: str) -> CallDelta | Literal["cut"] | None:
    if (call := tags.call.match(text)) is None:
        return None
    schema = next(
        (each["function"].get("parameters") for each in definitions if each["function"]["name"] == call[1]), None
    )
    properties = (schema or {}).get("properties")
    types = properties if isinstance(properties, dict) else {}
    arguments, position = dict[str, object](), call.end()
    while (argument := tags.argument.match(text, position)) is not None:
        key = argument[1].strip()
        read = None if _is_text(types.get(key)) else _json(text, argument.end(), tags.value_end)
        if isinstance(read, str):
            return read
        end = tags.value_end.search(text, argument.end()) if read is None else read.end
        if end is None:
            return None
        arguments[key] = text[argument.end() : end.start()] if read is None else read.value
        position = end.end()
    if text[position:].strip() != tags.after_arguments.strip():
        return None
    return CallDelta(call[1], msgspec.json.encode(arguments).decode())


def _is_text(schema: object) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


class _Json(NamedTuple):
    value: object
    end: re.Match[str]


def _json(text: str, position: int, end_of_value: re.Pattern[str]) -> _Json | Literal["cut"] | None:
    """The JSON at a position, and the tag after it; None for a value that is no JSON."""
    begin = len(text) - len(text[position:].lstrip())
    try:
        _, stop = JSON.raw_decode(text, begin)
        value = msgspec.json.decode(text[begin:stop])
    except (ValueError, msgspec.DecodeError, RecursionError):
        return CUT if is_cut(text[begin:]) else None
    end = re.compile(r"\s*" + end_of_value.pattern).match(text, stop)
    return None if end is None else _Json(value, end)
