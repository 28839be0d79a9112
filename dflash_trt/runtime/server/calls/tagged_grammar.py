# SPDX-License-Identifier: Apache-2.0
"""Structural tags of calls in the formats of `tagged_calls`: arguments in the schema's order, texts without quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.json_schema import ANNOTATIONS, DEFINITIONS
from dflash_trt.runtime.grammars.structural_tags import PLACE
from dflash_trt.runtime.server.calls.hermes import BEGIN, END
from dflash_trt.runtime.server.calls.tagged_calls import TaggedFormat

Json = dict[str, Any]
KEY = r"[\w.$-]{1,64}"
"""Names of arguments that can be written as tags."""
OBJECT = {*ANNOTATIONS, *DEFINITIONS, "type", "properties", "required", "additionalProperties"}
"""Keywords of parameters that can be enforced; of an argument of type string, `enum` and `const` can."""


def _text(value: str) -> Json:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": elements}


LINE = _text("\n")
MAYBE_LINE: Json = {"type": "optional", "content": LINE}


class _Writing(NamedTuple):
    """Texts around the parts of a call."""

    begin: str
    """Before the name, as `key` before an argument's and `value` before its value."""
    key: str
    value: Sequence[Json]
    end_of_value: str
    end: str
    line: Json
    """After the name and after each argument."""
    end_of_json: str
    """Between a value that is no free text, and its end."""


WRITINGS: dict[TaggedFormat, _Writing] = {
    "qwen3-coder": _Writing(
        f"{BEGIN}\n<function=", "<parameter=", [_text(">\n")], "</parameter>", f"</function>\n{END}", LINE, "\n"
    ),
    "glm": _Writing(
        BEGIN, "<arg_key>", [_text("</arg_key>"), MAYBE_LINE, _text("<arg_value>")], "</arg_value>", END, MAYBE_LINE, ""
    ),
}


def tagged_call(form: TaggedFormat, name: str, schema: Json | None) -> Json:
    """The tag of one call, whose arguments match `schema`, or are any if it is None.

    Raises RequestError with the JSON pointer of a keyword that cannot be enforced in the format.
    """
    writing, place = WRITINGS[form], f"parameters of {name}"
    after_name = ">" if form == "qwen3-coder" else ""
    if schema is None:
        argument = _argument(writing, {"type": "regex", "pattern": KEY}, _free_text(writing))
        arguments: list[Json] = [{"type": "star", "content": argument}]
    else:
        arguments = [*_arguments(writing, schema, place, form)]
    return {
        "type": "tag",
        "begin": f"{writing.begin}{name}{after_name}",
        "content": _sequence(writing.line, *arguments),
        "end": writing.end,
    }


def _arguments(writing: _Writing, schema: Json, place: str, form: TaggedFormat) -> list[Json]:
    def refusal(pointer: str, problem: str) -> RequestError:
        return RequestError(f"tools: {place}: {pointer} {problem}", hint="leave it out, or leave strict out")

    if unknown := sorted(schema.keys() - OBJECT):
        raise refusal(f"/{unknown[0]}", f"cannot be enforced in the format of {form}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise refusal("/properties", f"is no object or /required no list: {shown(properties)}, {shown(required)}")
    definitions = {keyword: schema[keyword] for keyword in DEFINITIONS if keyword in schema}
    arguments = []
    for key in dict.fromkeys([*properties, *map(str, required)]):
        inner, pointer = properties.get(key, {}), f"/properties/{key}"
        if not re.fullmatch(KEY, key):
            raise refusal(pointer, f"cannot be written in the format of {form}")
        if not isinstance(inner, dict) or inner.get("type") != "string":
            schema_of_value = {**inner, **definitions} if isinstance(inner, dict) else inner
            content = {"type": "json_schema", "json_schema": schema_of_value, PLACE: f"{place}: {pointer}"}
            value = _sequence(content, _text(f"{writing.end_of_json}{writing.end_of_value}"))
        elif unknown := sorted(inner.keys() - ANNOTATIONS - {"type", "enum", "const"}):
            raise refusal(f"{pointer}/{unknown[0]}", f"cannot be enforced in the format of {form}")
        elif (choices := [inner["const"]] if "const" in inner else inner.get("enum")) is not None:
            texts = [text for text in choices if isinstance(text, str)] if isinstance(choices, list) else []
            if not texts or any(writing.end_of_value in text or END in text for text in texts):
                raise refusal(pointer, f"has no texts that can be written in the format of {form}")
            end = f"{writing.end_of_json}{writing.end_of_value}"
            value = {"type": "or", "elements": [_text(f"{text}{end}") for text in texts]}
        else:
            value = _free_text(writing)
        argument = _argument(writing, _text(key), value)
        arguments.append(argument if key in required else {"type": "optional", "content": argument})
    return arguments


def _argument(writing: _Writing, key: Json, value: Json) -> Json:
    return _sequence(_text(writing.key), key, *writing.value, value, writing.line)


def _free_text(writing: _Writing) -> Json:
    """A text up to its end, in which no call ends."""
    return {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": [END]}, "end": writing.end_of_value}
