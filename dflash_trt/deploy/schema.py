# SPDX-License-Identifier: Apache-2.0
"""Versioned schemas: the keys, types and ranges that a runtime's release accepts, as JSON Schema (draft 2020-12).

Extensions: `x-source` is where the keys of a definition were read, `x-rules` holds the figures of the rules. An enum
with `x-open` may have more values than are listed; those of `x-newer` came after the release, each with its source.
`x-coerces` and `x-case` are about conversions (schema_check.py). A key with `x-removed` is read and dropped. An alias
is a property that only refers to its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflash_trt.deploy.gpus import DATA
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import package_data, read_json

SCHEMAS = Path(__file__).parent / "schemas"
Runtime = Literal["trtllm", "vllm", "sglang"]
TITLES: dict[Runtime, str] = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
PACKAGES: dict[Runtime, str] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "sglang": "sglang"}
ALIAS = "/properties/"


class RuntimeKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per-runtime names of the common settings."""

    ranks: str
    max_batch_size: str
    max_num_tokens: str
    max_seq_len: str
    num_draft_tokens: str
    counts_window: bool = False
    """Whether num_draft_tokens includes the last verified token."""
    cache_dtype: str
    draft: str
    method: str
    """The key of the drafting method."""


@cache
def runtime_keys() -> dict[str, RuntimeKeys]:
    """By runtime."""
    return package_data(DATA / "runtime_keys.json", dict[str, RuntimeKeys])


class Schema(msgspec.Struct, frozen=True):
    """One release of one runtime."""

    runtime: Runtime
    version: str
    rules: dict[str, dict[str, Any]]
    """Figures of the rules, each with its source."""
    json: dict[str, Any]
    """The JSON Schema itself."""
    stands_for: str | None = None
    """The release that was asked for, which has no schema of its own: this is the nearest one's."""

    @property
    def keys(self) -> RuntimeKeys:
        return runtime_keys()[self.runtime]

    @property
    def release(self) -> str:
        """The release that is written and checked for."""
        return self.stands_for or self.version

    def __str__(self) -> str:
        by = f" by the schema of {self.version}, the nearest that is known" if self.stands_for else ""
        return f"{PACKAGES[self.runtime]} {self.release}{by}"

    def properties(self, name: str | None = None) -> dict[str, dict[str, Any]]:
        """The properties of a definition, of the arguments themselves unless named; aliases left out."""
        definition = self.json["$defs"][name] if name else self._resolve(self.json["$ref"])
        return {
            key: value
            for key, value in definition["properties"].items()
            if ALIAS not in value.get("$ref", "") and "x-removed" not in value
        }

    def removed(self) -> dict[str, str]:
        """Arguments that the release reads and drops, each with what took its place."""
        properties = self._resolve(self.json["$ref"])["properties"]
        return {key: value["x-removed"] for key, value in properties.items() if "x-removed" in value}

    def names(self) -> dict[str, str]:
        """Key by each of its names, for the arguments of a command line."""
        properties = self._resolve(self.json["$ref"])["properties"]
        return {name: value.get("$ref", "").partition(ALIAS)[2] or name for name, value in properties.items()}

    def setting(self, document: dict[str, Any], path: str) -> Any:
        """The value at a dotted path, or the release's default; None where neither is."""
        value: Any = document
        property_: dict[str, Any] = self.json
        for key in path.split("."):
            applying = self.applying(property_, value if isinstance(value, dict) else {})
            described = (part["properties"][key] for part in applying if key in part.get("properties", {}))
            property_ = next(described, {})
            value = value[key] if isinstance(value, dict) and key in value else property_.get("default")
        return value

    def applying(self, part: dict[str, Any], value: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The subschemas that describe a mapping: `part`, what it refers to, and the branches that `value` takes."""
        yield part
        if "$ref" in part:
            yield from self.applying(self._resolve(part["$ref"]), value)
        for branch in part.get("allOf", []):
            if validator_class()(branch["if"]).is_valid(value):
                yield from self.applying(branch["then"], value)

    def _resolve(self, reference: str) -> dict[str, Any]:
        node = self.json
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
        return node


@cache
def validator_class() -> Any:
    """jsonschema's validator with Python's strictness: 1.0 is no integer, and nan, which no bound stops, no number."""
    from jsonschema import Draft202012Validator, validators

    def is_integer(_: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def is_number(_: object, value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value

    checker = Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": is_integer, "number": is_number})
    return validators.extend(Draft202012Validator, type_checker=checker)


@cache
def schemas() -> dict[tuple[str, str], Schema]:
    """By runtime and version."""
    files = sorted(SCHEMAS.glob("*.json"))
    documents = [read_json(file, dict[str, Any], ConfigError, what="a schema of the package") for file in files]
    loaded = [Schema(doc["x-runtime"], doc["x-version"], doc["x-rules"], doc) for doc in documents]
    return {(schema.runtime, schema.version): schema for schema in loaded}


def versions(runtime: str) -> list[str]:
    """The releases of `runtime` that a schema describes, the newest last."""
    return [version for name, version in schemas() if name == runtime]


def load_schema(runtime: str, version: str | None = None) -> Schema:
    """The schema of a release, by default the newest; for a release without a schema, the nearest one.

    The nearest is the newest before it, or the oldest of all. Raises ConfigError for an invalid version.
    """
    from packaging.version import InvalidVersion, Version

    releases = versions(runtime)
    try:
        asked = Version(version or releases[-1])
    except InvalidVersion:
        raise ConfigError(
            f"--version: expected a release such as {releases[-1]}, found {shown(version)}",
            hint=f"leave it out for {releases[-1]}",
        ) from None
    if asked.public in releases:
        return schemas()[runtime, asked.public]
    earlier = [release for release in releases if Version(release) <= asked]
    nearest = max(earlier, key=Version) if earlier else min(releases, key=Version)
    return msgspec.structs.replace(schemas()[runtime, nearest], stands_for=asked.public)


Names = dict[str, dict[str, str]]


class RenamedFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """renamed_flags.json: new names by old one, by runtime."""

    source: str
    renamed: Names
    """Arguments that the runtime refuses."""
    deprecated: Names
    """Arguments that it still reads."""

    def successor(self, runtime: Runtime, name: str) -> str | None:
        """The argument that took the place of `name`; None for any other name."""
        return (self.renamed.get(runtime, {}) | self.deprecated.get(runtime, {})).get(name)


@cache
def renamed_flags() -> RenamedFlags:
    """The package's data."""
    return package_data(DATA / "renamed_flags.json", RenamedFlags)
