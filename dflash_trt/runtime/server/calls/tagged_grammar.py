# SPDX-License-Identifier: Apache-2.0
"""Structural tags of calls in the formats of `tagged_calls`: arguments in the schema's order, texts without quotes."""

from __future__ import annotations

import re
from typing import Any

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.json_schema import ANNOTATIONS, DEFINITIONS
from dflash_trt.runtime.grammars.structural_tags import PLACE
from dflash_trt.runtime.server.calls.hermes import BEGIN, END
from dflash_trt.runtime.server.calls.tagged_calls import TAGS, TaggedFormat, Tags

Json = dict[str, Any]
KEY = r"[\w.$-]{1,64}"
"""Names of arguments that can be written as tags."""
OBJECT = {*ANNOTATIONS, *DEFINITIONS, "type", "properties", "required", "additionalProperties"}
"""Keywords of parameters that can be enforced; of an argument of type string, `enum` and `const` can."""


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
