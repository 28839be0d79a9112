# SPDX-License-Identifier: Apache-2.0
"""Checks a configuration against a schema: unknown keys, wrong types, values out of range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_trt.deploy.finding import ERROR, WARNING, Finding
from dflash_trt.deploy.schema import PACKAGES, Class, Field, Schema
from dflash_trt.files.strict_yaml import nearest

PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "bool": bool, "int": int, "float": (int, float), "str": str, "list": list, "dict": dict, "section": dict,
}  # fmt: skip
WORDS = {
    "bool": "true or false", "int": "an integer", "float": "a number", "str": "a string", "list": "a list",
    "dict": "a mapping", "section": "a mapping", "null": "null",
}  # fmt: skip


def check_schema(schema: Schema, document: dict[str, Any]) -> Iterator[Finding]:
    """One finding a problem, in the order of the document."""
    yield from _Check(schema).check_class(schema.root, document, "")


class _Check:
    """Walks a document along the classes of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def check_class(self, name: str, document: dict[str, Any], scope: str) -> Iterator[Finding]:
        described = self._schema.classes[name]
        names = {alias: field for key, field in described.fields.items() for alias in (key, *field.aliases)}
        for key, value in document.items():
            if key in names:
                yield from self._check_value(names[key], value, f"{scope}{key}")
            else:
                near = nearest(str(key), names)
                yield self._unknown(described, name, f"{scope}{key}", near)

    def _unknown(self, described: Class, name: str, key: str, near: str | None) -> Finding:
        schema = self._schema
        elsewhere = described.source.version != schema.version
        read = f", whose keys were read at {described.source.version}" if elsewhere else ""
        # A word like no other may be a key that came with the release; a slip of the pen resembles one.
        severity = WARNING if elsewhere and near is None else ERROR
        expected = f"expected a key of {name} ({PACKAGES[schema.runtime]} {schema.version}{read})"
        return Finding("unknown-key", severity, key, f"{expected}, found an unknown one", _write(near, "remove it"))

    def _check_value(self, field: Field, value: Any, key: str) -> Iterator[Finding]:
        if "any" in field.types:
            return
        kind = next((name for name in field.types if _is(value, name)), None)
        if kind is None:
            words = [WORDS[name] for name in field.types]
            expected = f"expected {' or '.join(words)}, found {value!r}"
            yield Finding("wrong-type", ERROR, key, expected, f"give {words[0]}")
        elif kind in ("int", "float"):
            yield from _check_range(field, value, key)
        elif field.values is not None and kind == "str" and value not in field.values:
            choices = [str(choice) for choice in field.values]
            fix = _write(nearest(value, choices), "choose one of them")
            yield Finding("unknown-value", ERROR, key, f"expected one of {', '.join(choices)}, found {value!r}", fix)
        elif kind == "list" and field.items is not None:
            for index, item in enumerate(value):
                yield from self._check_value(field.items, item, f"{key}[{index}]")
        elif kind == "section":
            yield from self._check_section(field, value, key)

    def _check_section(self, field: Field, value: dict[str, Any], key: str) -> Iterator[Finding]:
        if field.sections is not None and field.discriminator is not None:
            choices, chosen = field.sections, value.get(field.discriminator, field.default_section)
            place, known = f"{key}.{field.discriminator}", ", ".join(field.sections)
            if chosen is None:
                yield Finding("missing-key", ERROR, place, f"expected one of {known}, found no such key", "add it")
                return
            if str(chosen) not in choices:
                near = nearest(str(chosen), choices)
                severity = ERROR if near else WARNING  # the runtime may know more than the schema describes
                fix = _write(near, "check its keys by hand")
                yield Finding("unknown-value", severity, place, f"expected one of {known}, found {chosen!r}", fix)
                return
        section = self._schema.section_of(field, value)
        if section is not None:
            yield from self.check_class(section, value, f"{key}.")


def _write(near: str | None, otherwise: str) -> str:
    return f"write {near}" if near else otherwise


def _is(value: object, kind: str) -> bool:
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(value, PYTHON_TYPES[kind])


def _check_range(field: Field, value: float, key: str) -> Iterator[Finding]:
    bounds = (
        ("at least", field.minimum, field.minimum is None or value >= field.minimum),
        ("at most", field.maximum, field.maximum is None or value <= field.maximum),
        ("more than", field.above, field.above is None or value > field.above),
        ("less than", field.below, field.below is None or value < field.below),
    )
    for words, bound, is_kept in bounds:
        if not is_kept:
            limit = f"{words} {bound:g}"
            yield Finding("out-of-range", ERROR, key, f"expected {limit}, found {value}", f"give {limit}")
