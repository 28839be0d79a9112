# SPDX-License-Identifier: Apache-2.0
"""Request settings that are given as KEY=VALUE: --set for one method, --extra for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.bench.run_record import RequestSettings

FIELD_TYPES = {"temperature": float, "max_tokens": int, "template": str, "thinking": str, "ignore_eos": str}
"""Settings of requests that a method may override."""
SET_BY_OPTIONS = {
    *FIELD_TYPES, "model", "messages", "prompt", "stream", "stream_options", "seed", "n", "max_completion_tokens"
}  # fmt: skip
Value = str | int | float | bool
KeyValues = Sequence[tuple[str, str]]


def method_overrides(pairs: KeyValues) -> dict[str, dict[str, Value | None]]:
    """Settings by method; raises ConfigError for a field or value that requests do not have."""
    overrides: dict[str, dict[str, Value | None]] = {}
    for place, text in pairs:
        name, _, field = place.rpartition(".")
        if not name or field not in FIELD_TYPES:
            raise ConfigError(f"--set: expected METHOD.FIELD=VALUE with {', '.join(FIELD_TYPES)}, found {shown(place)}")
        try:
            value = {"on": True, "off": False}[text] if field == "ignore_eos" else FIELD_TYPES[field](text)
            msgspec.convert({"template": "chat", "temperature": 0.0, "max_tokens": 1, field: value}, RequestSettings)
        except (KeyError, ValueError, msgspec.ValidationError):
            raise ConfigError(f"--set: expected a value of {field}, found {shown(text)}") from None
        overrides.setdefault(name, {})[field] = value
    return overrides


def extra_fields(pairs: KeyValues) -> Mapping[str, Value]:
    """Values are JSON where they can be: top_p=0.95 is a number, reasoning_effort=low a text."""
    fields: dict[str, Value] = {}
    for field, text in pairs:
        if not field.isidentifier() or field in SET_BY_OPTIONS:
            raise ConfigError(f"--extra: expected a field that no other option sets, found {shown(field)}")
        try:
            value = json_document(text.encode(), "--extra", ConfigError)
        except ConfigError:
            value = text
        fields[field] = value if isinstance(value, int | float) else text
    return fields
