# SPDX-License-Identifier: Apache-2.0
"""Strict loading of YAML files: an unknown, missing, repeated or mistyped key is an error that names it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from dflash_trt.errors import RecipeError

T = TypeVar("T", bound=msgspec.Struct)


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]  # untyped without types-PyYAML
    """yaml.SafeLoader that refuses what it would drop: all but the last of equal keys."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[object, object]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise yaml.YAMLError(f"key {key!r} twice in one mapping{node.start_mark}")
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_yaml(file: Path, struct: type[T]) -> T:
    """The document of `file` as `struct`.

    Raises RecipeError, with file, key and the nearest valid key, for anything that `struct` does not describe.
    """
    try:
        document = yaml.load(file.read_bytes(), Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise RecipeError(f"{file}: expected a readable file, found: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise RecipeError(f"{file}: expected YAML, found {' '.join(str(error).split())}") from None
    _check_keys(file, "", document, msgspec.inspect.type_info(struct))
    try:
        return msgspec.convert(document, struct)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".") or "document"
        raise RecipeError(f"{file}: {key}: {message[:1].lower()}{message[1:]}") from None


def _check_keys(file: Path, scope: str, value: object, expected: msgspec.inspect.Type) -> None:
    """Raises for keys that the structs inside `expected` do not have, or that they miss; types come later."""
    if isinstance(expected, msgspec.inspect.VarTupleType) and isinstance(value, list):
        for index, item in enumerate(value):
            _check_keys(file, f"{scope}[{index}]", item, expected.item_type)
    if not isinstance(expected, msgspec.inspect.StructType) or not isinstance(value, dict):
        return
    prefix = f"{scope}." if scope else ""
    valid = [field.encode_name for field in expected.fields]
    for key in value:
        if key not in valid:
            raise RecipeError(
                f"{file}: {prefix}{key}: expected only the keys {', '.join(valid)}, found an unknown one"
                f"{closest(str(key), valid, 'key')}"
            )
    for field in expected.fields:
        if field.encode_name in value:
            _check_keys(file, f"{prefix}{field.encode_name}", value[field.encode_name], field.type)
        elif field.required:
            raise RecipeError(
                f"{file}: {scope or 'document'}: expected the key {field.encode_name!r},"
                f" found only {', '.join(map(str, value)) or 'an empty mapping'}"
            )


def closest(word: str, valid: Iterable[str], kind: str) -> str:
    """' (nearest KIND: ...)', or nothing where nothing is near."""
    near = difflib.get_close_matches(word, list(valid), n=1)
    return f" (nearest {kind}: {near[0]})" if near else ""
