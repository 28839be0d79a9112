# SPDX-License-Identifier: Apache-2.0
"""A JSON schema is enforced by each of its keywords, or refused with the pointer of one."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.runtime.grammars.json_schema import MAX_PROPERTIES, checked_schema
from tests.runtime.grammars.sampler import is_valid, sample


def closed(**properties: Any) -> dict[str, Any]:
    """Schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ENFORCED: dict[str, dict[str, Any]] = {
    "multipleOf": closed(m={"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 99}),
    "fractions": closed(m={"type": "number", "multipleOf": 0.25, "minimum": 0}),
    "number range": closed(a={"type": "number", "minimum": 0.5, "exclusiveMaximum": 0.75}),
    "allOf": {"allOf": [closed(a={"enum": [1, 2]}), {"properties": {"a": {"const": 2}}}]},
    "pattern and length": closed(a={"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}),
    "pattern inside": closed(a={"type": "string", "pattern": "b", "maxLength": 4}),
    "two patterns": closed(a={"pattern": "a", "type": "string", "allOf": [{"pattern": "b"}], "maxLength": 5}),
    "date": closed(a={"type": "string", "format": "date"}),
    "time": closed(a={"type": "string", "format": "date-time", "pattern": "^20"}, b={"type": "string",
    "format": "time"}),
    "February": closed(a={"type": "string", "format": "date", "pattern": "^[0-9]{2}00-02-2"}),
    "address": closed(a={"type": "string", "format": "ipv4"}),
    "constants": closed(a={"enum": ["x", 1, None, True, {"y": [1.5]}]}, b={"const": [0.1, {"c": "\n"}]}),
    "map": {"type": "object", "additionalProperties": {"enum": [1]}, "minProperties": 1, "maxProperties": 2},
    "required without properties": {"type": "object", "required": ["z"], "additionalProperties": {"enum": [1]}},
    "patternProperties": {"patternProperties": {"^a": {"type": "null"}}, "type": "object",
    "additionalProperties": False},
    "tuple": closed(a={"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1}),
    "old tuple": closed(a={"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}, "maxItems": 3}),
    "false property": {"type": "object", "properties": {"a": False, "b": {"enum": [1]}}, "required": ["b"]},
    "types": closed(a={"type": ["integer", "null"], "minimum": 5, "maximum": 7}),
    "recursion": {"$defs": {"n": closed(v={"enum": [1]}, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
                  "$ref": "#/$defs/n"},
    "oneOf": closed(a={"oneOf": [{"type": "boolean"}, closed(k={"const": "x"}), closed(k={"const": "y"}),
    {"const": 1}]}),
    "without a type": {"minimum": 3, "maxLength": 2, "maxItems": 1, "maxProperties": 1},
    "annotations": {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "a", "title": "x", "x-y": 1,
                    **closed(a={"type": "boolean", "deprecated": True, "default": 5, "uniqueItems": False})},
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
def test_random_answers_are_valid(name: str) -> None:
    schema, random = ENFORCED[name], Random(1)
    texts = [sample(Grammar(kind="json_schema", text=json.dumps(schema)), random) for _ in range(10)]
    whole = [text for text in texts if text is not None]
    assert [text for text in whole if not is_valid(text, schema)] == []
    assert whole


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not cannot be enforced"),
    ({"items": {"anyOf": [{}, {"uniqueItems": True}]}}, "/items/anyOf/1/uniqueItems cannot be enforced"),
    ({"if": {}, "then": {}}, "/if cannot"), ({"contains": {}}, "/contains cannot"), ({"nullable": True}, "/nullable"),
    ({"dependentRequired": {}}, "/dependentRequired"), ({"unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({"propertyNames": {}}, "/propertyNames"), ({"minlength": 3}, "/minlength cannot"), ({"dependencies": {}}, "/dep"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}, "b": {"if": {}}}}, "/$defs/a/not cannot"),
    ({"properties": {"a/b": {"items": {"$dynamicRef": "#"}}}}, "/properties/a~1b/items/$dynamicRef cannot"),
    ({"$ref": "https://example.org/a"}, "/$ref points into another document, which is not fetched"),
    ({"$ref": "other.json#/a"}, "/$ref points into another document"),
    ({"$ref": "#a"}, "/$ref is no plain JSON pointer"),
    ({"$ref": "#/a~1b", "a~1b": {}}, "/a~01b cannot"), ({"$ref": "#/$defs/a%25"}, "/$ref is no plain JSON pointer"),
    ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "/$ref is no plain JSON pointer to a part of the schema"),
    ({"items": {"$id": "x", "$ref": "#"}}, "/items/$id cannot"), ({"items": {"$schema": "x"}}, "/items/$schema cannot"),
    ({"format": "iban"}, "/format is none of date-time, "), ({"format": "unknown"}, "/format is none of date-time, "),
    ({"prefixItems": [{}], "additionalItems": False}, "/prefixItems cannot be enforced beside additionalItems"),
    ({"items": {}, "additionalItems": False}, "/additionalItems has no effect without a list of items"),
    ({"minProperties": 3, "required": ["a"]}, "/minProperties of 3 cannot be enforced with 1 required"),
    ({"const": 2**53 + 1}, "/const has 9007199254740993, which is compared as FP64"),
    ({"enum": [[{"a": -(2**60)}]]}, "/enum has -1152921504606846976, which"), ({"minimum": 2**53 + 1}, "/minimum has"),
    ({"properties": {f"k{i}": {} for i in range(MAX_PROPERTIES + 1)}}, "/properties has 513 entries; at most 512"),
    ({"patternProperties": {f"^{i}x": {} for i in range(40)}}, "/patternProperties has 40 entries; at most 32"),
    ({"pattern": "a(?!b)"}, "/pattern: the lookahead (?! in a regular expression cannot be enforced"),
    ({"patternProperties": {r"\ba": {}}}, r"/patternProperties/\ba: the word boundary \b in a regular expression"),
    ({"pattern": 5}, "/pattern is no text, but 5"), ({"pattern": "a$b"}, "/pattern: the regular expression 'a$b'"),
    ({"properties": 5}, "/properties is no object, but 5"), ({"items": 5}, "/items is no schema, but 5"),
    ({"allOf": {"a": 1}}, "/allOf/a cannot"), ({"anyOf": "x"}, "/anyOf is no schema, but 'x'"),
    ({"$ref": 5}, "/$ref is no text"),
    ({"format": "date", "allOf": 5}, "/allOf is no schema, but 5"),
    ({"x-guidance": {"lenient": True}}, "/x-guidance allows whitespace_flexible alone"),
    ({"x-guidance": {"coerce_one_of": True}}, "/x-guidance allows"), ({"x-guidance": 5}, "/x-guidance allows"),
    ({"items": {"x-guidance": {}}}, "/items/x-guidance cannot"),
    ({"allOf": [{"pattern": f"a{i}"} for i in range(9)]}, "/ makes one text match more than 8 patterns and formats"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        checked_schema(schema, "json")
    assert refusal.value.message.startswith(f"json: {message}"), refusal.value.message


@pytest.mark.parametrize(
    ("schema", "message"),
    [(closed(a={"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}), "oneOf"), (closed(a={"enum": []}), "Unsatisfiable"),
     ({"type": "nope"}, "Invalid type"), ({"minLength": -1}, "minLength"), ({"required": 5}, "required"),
     ({"type": "object", "required": ["a"], "additionalProperties": False}, "Unsatisfiable")],
    ids=str,
)  # fmt: skip
def test_what_llguidance_refuses(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=rf"a: the json_schema cannot be enforced: .*{message}"):
        sample(Grammar(kind="json_schema", text=json.dumps(schema), field="a"), Random(1))


def test_a_compact_text() -> None:
    schema = {"x-guidance": {"whitespace_flexible": False}, **closed(a={"enum": [1]}, b={"enum": [2]})}
    assert sample(Grammar(kind="json_schema", text=json.dumps(schema)), Random(1)) == '{"a":1,"b":2}'


def test_whitespace_is_bounded() -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps(closed(a={"enum": [1]})))
    random = Random(1)
    texts = [sample(grammar, random) for _ in range(20)]
    runs = Counter(len(text) - len(text.strip()) for whole in texts for text in str(whole).split('"a"'))
    assert max(runs) <= 32
    assert len(runs) > 2


def test_a_schema_stays_as_it_was() -> None:
    schema = closed(a={"title": "x", "type": "null"})
    before = json.dumps(schema)
    checked_schema(schema, "a")
    assert json.dumps(schema) == before
