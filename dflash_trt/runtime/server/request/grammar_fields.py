# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of structured outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.server.request.fields import FORMATS
from dflash_trt.runtime.server.request.json_object import decode_object

ANY_OBJECT = '{"type": "object"}'


def read_grammar(fields: dict[str, Any]) -> Grammar | None:
    """The grammar of a request, if it has one; RequestError, with the field's name, for an invalid one."""
    grammar = _response_format(fields.get("response_format", {"type": "text"}))
    if (options := fields.get("structured_outputs")) is not None:
        if grammar is not None:
            raise RequestError("structured_outputs: it cannot be combined with response_format")
        grammar = _structured_outputs(options)
    return grammar


def _response_format(value: object) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object") and isinstance(value, dict) and len(value) > 1:
        raise RequestError(f"response_format: type {kind} takes no other fields: {shown(value)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_schema", text=ANY_OBJECT, field="response_format")
    if kind == "json_schema" and isinstance(value, dict):
        described = value.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise RequestError(f"response_format: json_schema.schema is missing: {shown(value)}")
        return _json(described["schema"], "response_format")
    if kind == "structural_tag":
        return Grammar(kind="structural_tag", text=_encoded(value, "response_format"), field="response_format")
    raise RequestError(f"response_format: its type is none of {', '.join(FORMATS)}: {shown(value)}")


def _structured_outputs(value: object) -> Grammar:
    options = {k: v for k, v in value.items() if v is not None and v is not False} if isinstance(value, dict) else {}
    if len(options) != 1 or not options.keys() <= READERS.keys():
        raise RequestError(f"structured_outputs: it must have one of {', '.join(READERS)}: {shown(value)}")
    ((name, option),) = options.items()
    return READERS[name](option)


def _json(value: object, field: str = "structured_outputs") -> Grammar:
    schema = decode_object(value, field) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise RequestError(f"{field}: the JSON schema is no object, but {shown(value)}")
    return Grammar(kind="json_schema", text=_encoded(schema, field), field=field)


def _encoded(value: object, field: str = "structured_outputs") -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise RequestError(f"{field}: it has too many levels of brackets") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"structured_outputs: {shown(value)} is no text")
    return value


def _json_object(value: object) -> Grammar:
    if value is not True:
        raise RequestError(f"structured_outputs: json_object can only be true, not {shown(value)}")
    return Grammar(kind="json_schema", text=ANY_OBJECT)


def _choice(value: object) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise RequestError(f"structured_outputs: choice is no list of texts, but {shown(value)}")
    return Grammar(kind="choice", text=_encoded(value))


def _structural_tag(value: object) -> Grammar:
    tag = decode_object(value, "structured_outputs") if isinstance(value, str) else value
    return Grammar(kind="structural_tag", text=_encoded(tag))


READERS: dict[str, Callable[[object], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": lambda value: Grammar(kind="regex", text=_text(value)),
    "choice": _choice,
    "grammar": lambda value: Grammar(kind="grammar", text=_text(value)),
    "structural_tag": _structural_tag,
}
