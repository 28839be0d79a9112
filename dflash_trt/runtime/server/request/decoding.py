# SPDX-License-Identifier: Apache-2.0
"""Decodes a body's fields; unsupported ones and wrong values are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from dflash_trt.api.fields import checked_number
from dflash_trt.api.neutral_fields import ANY, check_neutral
from dflash_trt.api.sampling_params import NUMBERS
from dflash_trt.errors import RequestError, shown
from dflash_trt.files.strict_yaml import nearest

T = TypeVar("T", bound=msgspec.Struct)
TYPES = {"int": "an integer", "float": "a number", "str": "a text", "array": "a list", "object": "an object",
         "bool": "true or false", "null": "null"}  # fmt: skip
"""Words for msgspec's types."""
ALIASES = {"max_completion_tokens": "max_tokens"}
UNITS = {"str": "characters", "array": "items", "object": "items"}
PATH = re.compile(r" - at (?:`key` in )?`\$\.(?P<path>.+)`")
UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
LENGTH = re.compile(r"Expected `(?P<type>\w+)` of length (?P<sign>[<>])= (?P<limit>\d+)")
TYPE = re.compile(r"Expected `(?P<types>[\w |]+)`(?:, got .*| (?P<bound>[<>]=? \S+))")


def decode_fields(fields: Mapping[str, Any], body: type[T], neutral: Mapping[str, tuple[object, ...] | None]) -> T:
    """Decodes `fields`, where null is a field that is left out; RequestError for one that is invalid.

    `neutral` has the values of unsupported fields that change nothing.
    """
    names = body.__struct_fields__
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name.startswith("guided_") and name not in neutral:
            raise RequestError(f"{name}: vLLM 0.12 renamed it to structured_outputs")
        if name not in names and neutral.get(name) is not ANY:
            check_neutral(name, value, neutral[name])
    known = {name: value for name, value in given.items() if name in names or name not in neutral}
    try:
        return msgspec.convert(known, body, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), fields, body) from None


def _refusal(problem: str, fields: Mapping[str, Any], body: type[msgspec.Struct]) -> RequestError:
    """msgspec's error in our words."""
    place = PATH.search(problem)
    path, problem = (place["path"], problem[: place.start()]) if place else ("", problem)
    parent = f"{path}." if path else ""
    if unknown := UNKNOWN.match(problem):
        like = nearest(unknown["name"], _field_names(body, path))
        return RequestError(
            f"{parent}{unknown['name'][:100]}: unknown field" + (f"; did you mean {like}?" if like else "")
        )
    if missing := MISSING.match(problem):
        return RequestError(f"{parent}{missing['name']}: the field is missing")
    value = fields[re.split(r"[.\[]", path)[0]]
    if (number := NUMBERS.get(ALIASES.get(path, path))) is not None:
        checked_number(path, value, number)
    if length := LENGTH.match(problem):
        bound, other = ("most", "more") if length["sign"] == "<" else ("least", "fewer")
        found = len(value) if path in fields else other
        unit = UNITS[length["type"]] if length["limit"] != "1" else UNITS[length["type"]].removesuffix("s")
        return RequestError(f"{path}: expected at {bound} {length['limit']} {unit}, found {found}")
    if (expected := TYPE.match(problem)) is None:
        return RequestError(f"{path}: expected a smaller number, found {shown(value)}")
    words = " or ".join(TYPES[name] for name in expected["types"].split(" | "))
    return RequestError(f"{path}: expected {' '.join(filter(None, [words, expected['bound']]))}, found {shown(value)}")


def _field_names(body: type[msgspec.Struct], path: str) -> list[str]:
    """Fields of the struct at `path` in a body; none where it is in a list."""
    if not path:
        return list(body.__struct_fields__)
    kind = get_type_hints(body).get(path)
    return [name for each in (kind, *get_args(kind)) for name in getattr(each, "__struct_fields__", ())]
