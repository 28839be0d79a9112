# SPDX-License-Identifier: Apache-2.0
"""Strict loading of YAML: an unknown, missing, repeated or mistyped key is an error that names it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from dflash_trt.errors import DFlashError

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


def read_yaml(file: Path, error: type[DFlashError]) -> object:
    """The document of `file`, safely loaded; raises `error` when it is unreadable or not YAML."""
    try:
        return yaml.load(file.read_bytes(), Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except OSError as problem:
        raise error(f"{file}: expected a readable file, found: {problem.strerror}") from None
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError, ValueError, TypeError) as problem:
        raise error(f"{file}: expected YAML, found {' '.join(str(problem).split())}") from None


def load_yaml(file: Path, struct: type[T], error: type[DFlashError]) -> T:
    """The document of `file` as `struct`.

    Raises `error`, with file, key and the nearest valid key, for anything that `struct` does not describe.
    """
    document = read_yaml(file, error)
    _Checker(file, error).check("", document, msgspec.inspect.type_info(struct))
    try:
        return msgspec.convert(document, struct)
    except msgspec.ValidationError as problem:
        message, _, place = str(problem).partition(" - at `$")
        key = place.rstrip("`").lstrip(".") or "document"
        found = "" if ", got" in message else _found(document, place)
        raise error(f"{file}: {key}: {message[:1].lower()}{message[1:]}{found}") from None


def _found(document: object, place: str) -> str:
    """', found VALUE' for a place like `.rules[0].name`, where msgspec names only the bound that a value breaks."""
    for part in re.findall(r"\w+", place):
        if isinstance(document, dict):
            document = document.get(part)
        elif isinstance(document, list):
            document = document[int(part)]
    return f", found {document!r}"


class _Checker:
    """Raises for keys that a struct does not have or that it misses, and for words that are none of its choices."""

    def __init__(self, file: Path, error: type[DFlashError]) -> None:
        self._file = file
        self._error = error

    def check(self, scope: str, value: object, expected: msgspec.inspect.Type) -> None:
        """Checks `value`, found at `scope`, and what lies below it; other types are msgspec's matter."""
        if isinstance(expected, msgspec.inspect.VarTupleType) and isinstance(value, list):
            for index, item in enumerate(value):
                self.check(f"{scope}[{index}]", item, expected.item_type)
        if isinstance(expected, msgspec.inspect.UnionType):
            for option in expected.types:
                is_struct = isinstance(option, msgspec.inspect.StructType) and isinstance(value, dict)
                is_choice = isinstance(option, msgspec.inspect.LiteralType) and isinstance(value, str)
                if is_struct or is_choice:
                    self.check(scope, value, option)
        if isinstance(expected, msgspec.inspect.LiteralType) and isinstance(value, str):
            self._check_choice(scope, value, [str(choice) for choice in expected.values])
        if isinstance(expected, msgspec.inspect.StructType) and isinstance(value, dict):
            self._check_keys(scope, value, expected)

    def _check_choice(self, scope: str, value: str, choices: list[str]) -> None:
        if value not in choices:
            raise self._error(
                f"{self._file}: {scope}: expected one of {', '.join(choices)}, found {value!r}"
                f"{closest(value, choices, 'value')}"
            )

    def _check_keys(self, scope: str, value: dict[object, object], expected: msgspec.inspect.StructType) -> None:
        prefix = f"{scope}." if scope else ""
        valid = [field.encode_name for field in expected.fields]
        for key in value:
            if key not in valid:
                raise self._error(
                    f"{self._file}: {prefix}{key}: expected only the keys {', '.join(valid)}, found an unknown one"
                    f"{closest(str(key), valid, 'key')}"
                )
        for field in expected.fields:
            if field.encode_name in value:
                self.check(f"{prefix}{field.encode_name}", value[field.encode_name], field.type)
            elif field.required:
                raise self._error(
                    f"{self._file}: {scope or 'document'}: expected the key {field.encode_name!r},"
                    f" found only {', '.join(map(str, value)) or 'an empty mapping'}"
                )


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The word of `valid` that `word` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, list(valid), n=1)), None)


def closest(word: str, valid: Iterable[str], kind: str) -> str:
    """' (nearest KIND: ...)', or nothing where nothing is near."""
    near = nearest(word, valid)
    return f" (nearest {kind}: {near})" if near else ""
