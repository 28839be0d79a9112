# SPDX-License-Identifier: Apache-2.0
"""Strict loading of YAML: an unknown, missing, repeated or mistyped key is an error that names it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from dflash_trt.errors import DFlashError, cut, shown
from dflash_trt.files.read import read_text

T = TypeVar("T", bound=msgspec.Struct)
MAX_BYTES = 128 * 2**10  # ours have 4 KiB; the parser, in Python, needs seconds for more
MAX_DEPTH = 32
MAX_DIGITS = 64  # characters of a number
INTEGERS = range(-(2**63), 2**64)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # untyped without types-PyYAML
    """yaml.SafeLoader for plain data: refuses tags, aliases, repeated keys and likely mistakes."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        """Refuses aliases before anything is built, as they may expand to more than fits into memory."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"the alias *{event.anchor}, expected the value itself{event.start_mark}")
        if event.tag is not None:
            raise yaml.YAMLError(f"the tag {shown(event.tag)}, expected plain values{event.start_mark}")
        if self._depth == MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels{event.start_mark}")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def unique_mapping(self, node: yaml.MappingNode) -> dict[object, object]:
        """The mapping; keys are plain values and unique."""
        entries: dict[object, object] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key that is not a plain value{key_node.start_mark}")
            key = self.construct_object(key_node)
            if key in entries:
                raise yaml.YAMLError(f"key {shown(key)} twice in one mapping{node.start_mark}")
            entries[key] = self.construct_object(value, deep=True)
        return entries

    def text(self, node: yaml.ScalarNode) -> str:
        """A string without control characters or unpaired surrogates, which escapes can produce."""
        text: str = self.construct_scalar(node)
        if wrong := CONTROL.search(text):
            raise yaml.YAMLError(f"the character {wrong[0]!r}, expected text{node.start_mark}")
        return text

    def integer(self, node: yaml.ScalarNode) -> int:
        """An integer of 64 bits."""
        self._check_digits(node)
        number: int = self.construct_yaml_int(node)
        if number not in INTEGERS:
            raise yaml.YAMLError(f"the integer {node.value}, beyond 64 bits{node.start_mark}")
        return number

    def number(self, node: yaml.ScalarNode) -> float:
        """A floating-point number."""
        self._check_digits(node)
        number: float = self.construct_yaml_float(node)
        return number

    def _check_digits(self, node: yaml.ScalarNode) -> None:
        if len(node.value) > MAX_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters, more than {MAX_DIGITS}{node.start_mark}")


for _tag, _construct in {
    "map": _StrictLoader.unique_mapping,
    "str": _StrictLoader.text,
    "int": _StrictLoader.integer,
    "float": _StrictLoader.number,
}.items():
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)


def read_yaml(file: Path, error: type[DFlashError]) -> object:
    """The document of `file`; raises `error` when it is unreadable, larger than MAX_BYTES or not plain YAML."""
    return yaml_document(read_text(file, error, limit=MAX_BYTES), file, error)


def yaml_documents(text: str, file: Path, error: type[DFlashError]) -> list[Any]:
    """All documents in `text`, which was read from `file`, as `---` separates them."""
    try:
        return list(yaml.load_all(text, Loader=_StrictLoader))
    except (yaml.YAMLError, ValueError) as problem:
        raise error(f"{file}: expected YAML, found {' '.join(str(problem).split())}") from None


def yaml_document(text: str, file: Path, error: type[DFlashError]) -> object:
    """The document in `text`, which was read from `file`: mappings, lists and plain values."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: an invalid date or escape
        raise error(f"{file}: expected YAML, found {' '.join(str(problem).split())}") from None


def load_yaml(file: Path, struct: type[T], error: type[DFlashError]) -> T:
    """The document of `file` as `struct`; errors name file, key and the nearest valid key."""
    document = read_yaml(file, error)
    _check(file, error, "", document, msgspec.inspect.type_info(struct))
    try:
        return msgspec.convert(document, struct)
    except msgspec.ValidationError as problem:
        message, _, place = str(problem).partition(" - at `$")
        key = place.rstrip("`").lstrip(".") or "document"
        found = "" if ", got" in message else _found(document, place)
        raise error(f"{file}: {key}: {message[:1].lower()}{message[1:]}{found}") from None


def _found(document: object, place: str) -> str:
    """', found VALUE' for a place like `.rules[0].name`: msgspec's message names only the violated bound."""
    for part in re.findall(r"\w+", place):
        if isinstance(document, dict):
            document = document.get(part)
        elif isinstance(document, list):
            document = document[int(part)]
    return f", found {shown(document)}"


def _check(file: Path, error: type[DFlashError], scope: str, value: object, expected: msgspec.inspect.Type) -> None:
    """Raises `error` for unknown and missing keys and unknown choices of `value` at `scope`."""
    match expected:
        case msgspec.inspect.VarTupleType() if isinstance(value, list):
            for index, item in enumerate(value):
                _check(file, error, f"{scope}[{index}]", item, expected.item_type)
        case msgspec.inspect.UnionType():
            for option in expected.types:
                _check(file, error, scope, value, option)
        case msgspec.inspect.LiteralType() if isinstance(value, str) and value not in expected.values:
            choices = [str(choice) for choice in expected.values]
            found = f"found {shown(value)}{closest(value, choices, 'value')}"
            raise error(f"{file}: {scope}: expected one of {', '.join(choices)}, {found}")
        case msgspec.inspect.StructType() if isinstance(value, dict):
            prefix = f"{scope}." if scope else ""
            valid = [field.encode_name for field in expected.fields]
            for key in value:
                if key not in valid:
                    raise error(
                        f"{file}: unknown key {prefix}{cut(str(key))}{closest(str(key), valid, 'key')}:"
                        f" expected only {', '.join(valid)}"
                    )
            for field in expected.fields:
                if field.encode_name in value:
                    _check(file, error, f"{prefix}{field.encode_name}", value[field.encode_name], field.type)
                elif field.required:
                    keys = cut(", ".join(map(str, value))) or "an empty mapping"
                    raise error(f"{file}: missing key {prefix}{field.encode_name}: found only {keys}")


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The word of `valid` closest to `word`, if one is similar."""
    return next(iter(difflib.get_close_matches(word, list(valid), n=1)), None)


def closest(word: str, valid: Iterable[str], kind: str) -> str:
    """' (nearest KIND: ...)', or an empty string if none is similar."""
    near = nearest(word, valid)
    return f" (nearest {kind}: {near})" if near else ""
