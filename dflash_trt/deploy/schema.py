# SPDX-License-Identifier: Apache-2.0
"""Versioned schemas: the keys, types and ranges that a runtime's release accepts, as data with their source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.strict_yaml import closest

SCHEMAS = Path(__file__).parent / "schemas"
Runtime = Literal["trtllm", "vllm", "sglang"]
PACKAGES = {"trtllm": "tensorrt_llm", "vllm": "vllm", "sglang": "sglang"}


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the keys of a class were read."""

    version: str
    repository: str
    commit: str | None
    file: str


class Field(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key."""

    types: tuple[str, ...]
    default: Any = msgspec.UNSET
    values: tuple[str | int, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    items: Field | None = None
    section: str | None = None
    discriminator: str | None = None
    sections: dict[str, str | None] | None = None
    """By the discriminator's value; None for a class that is known but not described."""
    default_section: str | None = None
    """The discriminator's value where a mapping does not say it."""
    aliases: tuple[str, ...] = ()


class Class(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mapping of keys."""

    source: Source
    fields: dict[str, Field]


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One release of one runtime."""

    runtime: Runtime
    version: str
    root: str
    rules: dict[str, dict[str, Any]]
    classes: dict[str, Class]

    def names(self) -> dict[str, str]:
        """Key by each of its names, for the arguments of a command line."""
        fields = self.classes[self.root].fields
        return {name: key for key, field in fields.items() for name in (key, *field.aliases)}

    def setting(self, document: dict[str, Any], path: str) -> Any:
        """The value at a dotted path, or the release's default; None where neither is."""
        fields = self.classes[self.root].fields
        value: Any = document
        *outer, last = path.split(".")
        for key in outer:
            value = value.get(key) if isinstance(value, dict) else None
            section = self.section_of(fields[key], value) or ""
            if section not in self.classes:
                return value.get(last) if isinstance(value, dict) else None
            fields = self.classes[section].fields
        if isinstance(value, dict) and last in value:
            return value[last]
        default = fields[last].default if last in fields else None
        return None if default is msgspec.UNSET else default

    def section_of(self, field: Field, value: object) -> str | None:
        """The class that describes a mapping, by its discriminator where there are several; None for none."""
        if field.section is not None or field.sections is None:
            return field.section
        assert field.discriminator is not None
        chosen = value.get(field.discriminator) if isinstance(value, dict) else None
        return field.sections.get(str(field.default_section if chosen is None else chosen))


@cache
def schemas() -> dict[tuple[str, str], Schema]:
    """By runtime and version."""
    loaded = [msgspec.json.decode(file.read_bytes(), type=Schema) for file in sorted(SCHEMAS.glob("*.json"))]
    return {(schema.runtime, schema.version): schema for schema in loaded}


def versions(runtime: str) -> list[str]:
    """The releases of `runtime` that a schema describes, the newest last."""
    return [version for name, version in schemas() if name == runtime]


def load_schema(runtime: str, version: str | None) -> Schema:
    """The schema of a release, the newest unless said otherwise; raises ConfigError for one that is not known."""
    known = versions(runtime)
    chosen = version or known[-1]
    if chosen not in known:
        raise ConfigError(
            f"{runtime}: expected a version whose schema is known ({', '.join(known)}), found {chosen!r}"
            f"{closest(chosen, known, 'version')}"
        )
    return schemas()[runtime, chosen]
