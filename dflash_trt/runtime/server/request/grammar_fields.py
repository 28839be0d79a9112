# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of structured outputs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.server.request.body import decode_object
from dflash_trt.runtime.server.request.request_fields import FORMATS, StructuredOutputs

ANY_OBJECT = {"type": "object"}


def read_grammar(response_format: dict[str, Any] | None, options: StructuredOutputs | None) -> Grammar | None:
    """The grammar of a request, if it has one; RequestError, with the field's name, for an invalid one."""
    grammar = None if response_format is None else _response_format(response_format)
    if options is None:
        return grammar
    if grammar is not None:
        raise RequestError("structured_outputs: it cannot be combined with response_format")
    return _structured_outputs(options)


def _response_format(given: dict[str, Any]) -> Grammar | None:
    field, kind = "response_format", given.get("type")
    if kind in ("text", "json_object") and len(given) > 1:
        raise RequestError(f"response_format: type {kind} takes no other fields: {shown(given)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return _grammar("json_schema", ANY_OBJECT, field)
    if kind == "json_schema":
        described = given.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise RequestError(f"response_format: json_schema.schema is missing: {shown(given)}")
        return _grammar("json_schema", described["schema"], field)
    if kind == "structural_tag":
        return _grammar("structural_tag", given, field)
    raise RequestError(f"response_format: its type is none of {', '.join(FORMATS)}: {shown(given)}")


def _structured_outputs(given: StructuredOutputs) -> Grammar:
    field = "structured_outputs"
    options: dict[Any, Any] = {name: value for name, value in msgspec.structs.asdict(given).items() if value}
    if len(options) != 1 or given.disable_any_whitespace:
        names = [name for name in given.__struct_fields__ if name != "disable_any_whitespace"]
        raise RequestError(f"structured_outputs: it must have one of {', '.join(names)}: {shown(options)}")
    ((name, option),) = options.items()
    if name in ("regex", "grammar"):
        return Grammar(kind=name, text=option, field=field)
    if name in ("json", "json_object"):
        return _grammar("json_schema", ANY_OBJECT if name == "json_object" else option, field)
    return _grammar(name, option, field)


def _grammar(kind: Literal["json_schema", "choice", "structural_tag"], value: object, field: str) -> Grammar:
    """A grammar whose text is JSON, which may be given as text."""
    if isinstance(value, str):
        value = decode_object(value, field)
    if kind == "json_schema" and not isinstance(value, dict):
        raise RequestError(f"{field}: the JSON schema is no object, but {shown(value)}")
    try:
        return Grammar(kind=kind, text=msgspec.json.encode(value).decode(), field=field)
    except RecursionError:
        raise RequestError(f"{field}: it has too many levels of brackets") from None
