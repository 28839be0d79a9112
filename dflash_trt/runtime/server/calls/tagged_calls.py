# SPDX-License-Identifier: Apache-2.0
"""Tool calls as Qwen3-Coder and GLM-4.5 write them, between Hermes's tags: arguments as tagged texts.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>

In their grammars arguments are in the schema's order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.json_schema import ANNOTATIONS, DEFINITIONS
from dflash_trt.runtime.grammars.structural_tags import PLACE
from dflash_trt.runtime.server.calls.hermes import BEGIN, CUT, END, JSON, CallDelta, ReadCall, is_cut, json_call

TaggedFormat = Literal["qwen3-coder", "glm"]
Json = dict[str, Any]
KEY = r"[\w.$-]{1,64}"
"""Names of arguments that can be written as tags."""
OBJECT = {*ANNOTATIONS, *DEFINITIONS, "type", "properties", "required", "additionalProperties"}
"""Keywords of parameters that can be enforced; of an argument of type string, `enum` and `const` can."""


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


def const_text(value: str) -> Json:
    """The tag of a text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Json) -> Json:
    """The tag of one part after another."""
    return {"type": "sequence", "elements": elements}


LINE = const_text("\n")
MAYBE_LINE: Json = {"type": "optional", "content": LINE}


def tagged_call(form: TaggedFormat, name: str, schema: Json | None) -> Json:
    """The tag of one call, whose arguments match `schema`, or are any if it is None.

    Raises RequestError with the JSON pointer of a keyword that cannot be enforced in the format.
    """
    tags, place = TAGS[form], f"parameters of {name}"
    if schema is None:
        argument = _argument(tags, {"type": "regex", "pattern": KEY}, _free_text(tags))
        arguments: list[Json] = [{"type": "star", "content": argument}]
    else:
        arguments = _arguments(tags, schema, place, form)
    return {
        "type": "tag",
        "begin": f"{BEGIN}{tags.before_name}{name}{tags.after_name}",
        "content": sequence(_line(tags), *arguments),
        "end": f"{tags.after_arguments}{END}",
    }


def _arguments(tags: Tags, schema: Json, place: str, form: TaggedFormat) -> list[Json]:
    def refusal(pointer: str, problem: str) -> RequestError:
        return RequestError(f"tools: {place}: {pointer} {problem}", hint="leave it out, or leave strict out")

    if unknown := sorted(schema.keys() - OBJECT):
        raise refusal(f"/{unknown[0]}", f"cannot be enforced in the format of {form}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise refusal("/properties", f"is no object or /required no list: {shown(properties)}, {shown(required)}")
    definitions = {keyword: schema[keyword] for keyword in DEFINITIONS if keyword in schema}
    arguments, end = [], ("\n" if tags.has_lines else "") + tags.after_value
    for key in dict.fromkeys([*properties, *map(str, required)]):
        inner, pointer = properties.get(key, {}), f"/properties/{key}"
        if not re.fullmatch(KEY, key):
            raise refusal(pointer, f"cannot be written in the format of {form}")
        if not isinstance(inner, dict) or inner.get("type") != "string":
            schema_of_value = {**inner, **definitions} if isinstance(inner, dict) else inner
            content = {"type": "json_schema", "json_schema": schema_of_value, PLACE: f"{place}: {pointer}"}
            value = sequence(content, const_text(end))
        elif unknown := sorted(inner.keys() - ANNOTATIONS - {"type", "enum", "const"}):
            raise refusal(f"{pointer}/{unknown[0]}", f"cannot be enforced in the format of {form}")
        elif (choices := [inner["const"]] if "const" in inner else inner.get("enum")) is not None:
            texts = [text for text in choices if isinstance(text, str)] if isinstance(choices, list) else []
            if not texts or any(tags.after_value in text or END in text for text in texts):
                raise refusal(pointer, f"has no texts that can be written in the format of {form}")
            value = {"type": "or", "elements": [const_text(f"{text}{end}") for text in texts]}
        else:
            value = _free_text(tags)
        argument = _argument(tags, const_text(key), value)
        arguments.append(argument if key in required else {"type": "optional", "content": argument})
    return arguments


def _argument(tags: Tags, key: Json, value: Json) -> Json:
    first, *others = tags.after_key
    between = [part for text in others for part in (MAYBE_LINE, const_text(text))]
    return sequence(const_text(tags.before_key), key, const_text(first), *between, value, _line(tags))


def _line(tags: Tags) -> Json:
    return LINE if tags.has_lines else MAYBE_LINE


def _free_text(tags: Tags) -> Json:
    """A text up to its end, in which no call ends."""
    return {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": [END]}, "end": tags.after_value}
