# SPDX-License-Identifier: Apache-2.0
"""Values as TensorRT-LLM's pydantic classes convert them, which take "64", 64.0 and true for an integer.

Each conversion is a warning, because other readers do not convert. A property with `x-case` is compared in that case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dflash_trt.deploy.finding import WARNING, Finding
from dflash_trt.deploy.schema import Schema

# pydantic's lax mode (2.14).
TRUE, FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")
INTEGER = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?\s*")
MAX_DIGITS = 4300  # Python's own limit for int
KINDS = ("integer", "number", "boolean")


def coerce(schema: Schema, document: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """`document` as the runtime's classes read it, and a finding for each value that they convert."""
    if not schema.json.get("x-coerces", False):
        return document, []
    findings: list[Finding] = []
    return _mapping(schema, schema.json, document, "", findings), findings


def _mapping(
    schema: Schema, part: dict[str, Any], document: dict[str, Any], path: str, findings: list[Finding]
) -> dict[str, Any]:
    described = {
        key: value
        for applying in schema.applying(part, document)
        for key, value in applying.get("properties", {}).items()
    }
    return {
        key: _value(schema, described.get(key, {}), value, f"{path}.{key}".removeprefix("."), findings)
        for key, value in document.items()
    }


def _value(schema: Schema, part: dict[str, Any], value: Any, path: str, findings: list[Finding]) -> Any:
    if isinstance(value, dict):
        return _mapping(schema, part, value, path, findings)
    if isinstance(value, list):
        items = part.get("items", {})
        return [_value(schema, items, item, f"{path}[{index}]", findings) for index, item in enumerate(value)]
    if isinstance(value, str) and "x-case" in part:
        return value.upper() if part["x-case"] == "upper" else value.lower()
    types = part.get("type", [])
    wanted = [kind for kind in ([types] if isinstance(types, str) else types) if kind in KINDS]
    if len(wanted) != 1 or "string" in types:
        return value
    read = next(_as(wanted[0], value), None)
    if read is None or (type(read) is type(value)) or (wanted[0] == "number" and type(value) is int):
        return value
    problem = f"expected {_text(read)}, found {value!r}, which the runtime reads as {_text(read)}"
    fix = "write the number that is meant" if isinstance(value, bool) else f"write {_text(read)}"
    findings.append(Finding("coerced", WARNING, path, problem, fix))
    return read


def _as(kind: str, value: object) -> Iterator[bool | int | float]:
    """Yield the value as pydantic converts it, or nothing."""
    if kind == "boolean":
        if isinstance(value, str) and value.lower() in TRUE + FALSE:
            yield value.lower() in TRUE
        elif isinstance(value, (int, float)) and value in (0, 1):
            yield bool(value)
    elif kind == "integer":
        if isinstance(value, str) and (match := INTEGER.fullmatch(value)) and len(match[1]) <= MAX_DIGITS:
            yield int(match[1])
        elif isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
            yield int(value)
    elif isinstance(value, bool):
        yield float(value)
    elif isinstance(value, str):
        try:
            yield float(value)
        except ValueError:
            return


def _text(value: float) -> str:
    return str(value).lower()
