# SPDX-License-Identifier: Apache-2.0
"""JSON schemas that can be enforced; others are refused, with the JSON pointer of what stands in the way.

llguidance 1.9.1 refuses keywords of a schema's own draft that it does not implement. It ignores keywords of other
drafts and $id, compares numbers as FP64 and may repeat a key: schemas for which that matters are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import msgspec

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.grammars.intersections import MAX_INTERSECTED, most_intersected, resolved
from dflash_trt.runtime.grammars.patterns import MAX_PATTERN, check_pattern

Schema = dict[str, Any]

ANNOTATIONS = {
    "$anchor", "$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
"""Keywords that restrict no answer."""
ROOT_ANNOTATIONS = ("$id", "$schema", "id")
"""Annotations of the whole schema; below its root they change what a $ref means."""
DEFINITIONS = ("$defs", "definitions")
NEUTRAL_IF_FALSE = ("uniqueItems", "nullable")
SUBSCHEMAS = (
    "properties", "patternProperties", "additionalProperties", "prefixItems", "items", "additionalItems", "allOf",
    "anyOf", "oneOf",
)  # fmt: skip
"""Keywords whose values hold schemas."""
NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS = {
    *SUBSCHEMAS, *NUMBERS, "$ref", "format", "maxItems", "maxLength", "maxProperties", "minItems", "minLength",
    "minProperties", "pattern", "required", "type",
}  # fmt: skip
"""Keywords that llguidance enforces."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that llguidance enforces by their syntax."""
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
REAL_DATE = f"^(?:{YEAR}-(?:0[13-9]|1[0-2])-..|{YEAR}-02-(?:[01].|2[0-8])|{LEAP_YEAR}-02-29)"
FORMAT_PATTERNS = {
    "date": REAL_DATE, "date-time": f"{REAL_DATE}[tT]..:..:[0-5]", "time": "^..:..:[0-5]",
}  # fmt: skip
"""Patterns beside llguidance's formats, which allow February 29 in every year and leap seconds at any time."""
OPTIONS = "x-guidance"
"""llguidance's options of a schema; only whitespace_flexible keeps the schema's meaning."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between two tokens of JSON, bounded so that no model indents for ever."""

LARGEST_INTEGER = 2**53
"""Up to this one FP64 holds every integer."""
MAX_PROPERTIES = 512
"""Named properties of an object. Compile time grows with the square of optional ones: 2,000 took 1.2 s."""
MAX_PATTERN_PROPERTIES = 32
"""Patterns of one patternProperties, which are compared with each other."""


def checked_schema(schema: Schema, field: str, pointer: str = "") -> str:
    """JSON of a schema for llguidance; RequestError for one that cannot be enforced.

    `pointer` is the place of the schema in the request's `field`. Whitespace is bounded, or none if the schema's
    x-guidance says so.
    """
    root = deepcopy(schema)
    options = root.pop(OPTIONS, {})
    if not isinstance(options, dict) or options.keys() - {"whitespace_flexible"}:
        raise RequestError(f"{field}: {pointer}/{OPTIONS} allows whitespace_flexible alone, found {shown(options)}")
    for keyword in ROOT_ANNOTATIONS:
        root.pop(keyword, None)
    _Walk(root, field, pointer).check()
    is_compact = options.get("whitespace_flexible") is False
    root[OPTIONS] = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITESPACE}
    return msgspec.json.encode(root).decode()


class _Walk:
    """Visits each schema that an answer may have to match, and removes its annotations."""

    def __init__(self, root: Schema, field: str, base: str) -> None:
        self._root, self._field, self._base = root, field, base
        self._num_characters = 0
        """Characters of the patterns so far."""

    def check(self) -> None:
        """Raises RequestError for the first part that cannot be enforced."""
        pending: list[tuple[str, object]] = [("", self._root)]
        seen: set[int] = set()
        while pending:
            pointer, schema = pending.pop()
            if isinstance(schema, bool) or id(schema) in seen:
                continue
            if not isinstance(schema, dict):
                raise self._refusal(pointer, f"is no schema, but {shown(schema)}")
            seen.add(id(schema))
            for keyword in [*schema]:
                self._check_keyword(pointer, keyword, schema)
            pending += reversed([*self._inner(pointer, schema)])
        if most_intersected(self._root) > MAX_INTERSECTED:
            raise self._refusal("", f"makes one text match more than {MAX_INTERSECTED} patterns and formats at once")

    def _refusal(self, pointer: str, problem: str) -> RequestError:
        hint = "docs/serve.md lists what structured outputs enforce"
        return RequestError(f"{self._field}: {self._base}{pointer or '/'} {problem}", hint=hint)

    def _check_keyword(self, pointer: str, keyword: str, schema: Schema) -> None:
        place, value = f"{pointer}/{escaped(keyword)}", schema[keyword]
        is_neutral = keyword in NEUTRAL_IF_FALSE and value is False
        if keyword in ANNOTATIONS or is_neutral or (keyword.startswith("x-") and keyword != OPTIONS):
            del schema[keyword]
        elif keyword in KEYWORDS:
            if (problem := PROBLEMS.get(keyword, _no_problem)(value, schema)) is not None:
                raise self._refusal(place, problem)
            if keyword == "pattern":
                self._check_pattern(place, value)
            if keyword == "format" and value in FORMAT_PATTERNS and isinstance(schema.setdefault("allOf", []), list):
                schema["allOf"].append({"pattern": FORMAT_PATTERNS[value]})
            if keyword == "patternProperties":
                for pattern in value:
                    self._check_pattern(f"{place}/{escaped(pattern)}", pattern)
        elif keyword not in DEFINITIONS:
            raise self._refusal(place, "cannot be enforced")

    def _check_pattern(self, place: str, pattern: str) -> None:
        check_pattern(pattern, f"{self._field}: {self._base}{place}")
        self._num_characters += len(pattern)
        if self._num_characters > MAX_PATTERN:
            raise self._refusal(place, f"and the patterns before it have more than {MAX_PATTERN} characters")

    def _inner(self, pointer: str, schema: Schema) -> Iterator[tuple[str, object]]:
        """Pointers and schemas below a schema, and the one that it refers to."""
        for keyword in SUBSCHEMAS:
            value, place = schema.get(keyword, True), f"{pointer}/{keyword}"
            if keyword in ("properties", "patternProperties") and isinstance(value, dict):
                yield from ((f"{place}/{escaped(name)}", inner) for name, inner in value.items())
            elif isinstance(value, list):
                yield from ((f"{place}/{index}", inner) for index, inner in enumerate(value))
            else:
                yield place, value
        if (reference := schema.get("$ref")) is not None:
            if (found := resolved(self._root, reference)) is None:
                raise self._refusal(f"{pointer}/$ref", _unresolved(reference))
            yield reference[1:], found


def escaped(key: str) -> str:
    """A key as part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _unresolved(reference: str) -> str:
    if not reference.startswith("#"):
        return f"points into another document, which is not fetched: {shown(reference)}"
    return f"is no plain JSON pointer to a part of the schema: {shown(reference)}"


def _no_problem(value: object, schema: Schema) -> str | None:
    return None


def _inexact(value: object, schema: Schema) -> str | None:
    """Problem of a value with an integer that FP64 does not hold."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, int) and abs(inner) > LARGEST_INTEGER:
            return f"has {inner}, which is compared as FP64 and cannot be enforced"
        pending += inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    return None


def _unknown_format(value: object, schema: Schema) -> str | None:
    return None if value in FORMATS else f"is none of {', '.join(FORMATS)}, but {shown(value)}"


def _tuple(value: object, schema: Schema) -> str | None:
    is_old = isinstance(schema.get("items"), list) or "additionalItems" in schema
    return "cannot be enforced beside additionalItems or a list of items" if is_old else None


def _additional_items(value: object, schema: Schema) -> str | None:
    return None if isinstance(schema.get("items"), list) else "has no effect without a list of items"


def _min_properties(value: object, schema: Schema) -> str | None:
    """llguidance may repeat a key that is not named, so that it counts twice."""
    required = schema.get("required")
    distinct = len(set(map(str, required))) + 1 if isinstance(required, list) else 1
    if isinstance(value, int) and value > distinct:
        return f"of {value} cannot be enforced with {distinct - 1} required properties; at most {distinct} can"
    return None


def _too_many(most: int) -> Callable[[object, Schema], str | None]:
    def problem(value: object, schema: Schema) -> str | None:
        if not isinstance(value, Mapping):
            return f"is no object, but {shown(value)}"
        return f"has {len(value)} entries; at most {most} are allowed" if len(value) > most else None

    return problem


def _no_text(value: object, schema: Schema) -> str | None:
    return None if isinstance(value, str) else f"is no text, but {shown(value)}"


PROBLEMS: dict[str, Callable[[object, Schema], str | None]] = {
    **dict.fromkeys(NUMBERS, _inexact),
    "$ref": _no_text,
    "pattern": _no_text,
    "format": _unknown_format,
    "prefixItems": _tuple,
    "additionalItems": _additional_items,
    "minProperties": _min_properties,
    "properties": _too_many(MAX_PROPERTIES),
    "patternProperties": _too_many(MAX_PATTERN_PROPERTIES),
}
"""By keyword, why a value cannot be enforced; None where it can, or where llguidance names the problem itself."""
