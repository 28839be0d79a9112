# SPDX-License-Identifier: Apache-2.0
"""Checks a configuration against its release's JSON Schema: one finding for each problem, with its fix.

Values are first read as TensorRT-LLM's pydantic classes convert them, which take "64", 64.0 and true for an integer.
Each conversion is a warning, because other readers do not convert. A property with `x-case` is compared in that case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from dflash_trt.deploy.finding import ERROR, WARNING, Finding
from dflash_trt.deploy.schema import Schema, renamed_flags, validator_class
from dflash_trt.errors import ConfigError, cut
from dflash_trt.files.json_file import json_document

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


WORDS = {
    "boolean": "true or false", "integer": "an integer", "number": "a number", "string": "a string",
    "array": "a list", "object": "a mapping", "null": "null",
}  # fmt: skip
BOUNDS = {
    "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "more than", "exclusiveMaximum": "less than",
}  # fmt: skip
Path = tuple[str | int, ...]


def check_schema(schema: Schema, document: dict[str, Any]) -> Iterator[Finding]:
    """One finding a problem, in the order of the document."""
    errors = list(validator_class()(schema.json).iter_errors(document))
    mistyped = {tuple(error.absolute_path) for error in errors if error.validator == "type"}
    findings: list[tuple[list[int], Finding]] = []
    for error in errors:
        path = tuple(error.absolute_path)
        if error.validator == "type" or path not in mistyped:  # a value of the wrong type breaks other bounds, too
            findings += [(_position(document, place), finding) for place, finding in _findings(schema, error, path)]
    yield from (finding for _, finding in sorted(findings, key=lambda entry: entry[0]))


def _findings(schema: Schema, error: Any, path: Path) -> Iterator[tuple[Path, Finding]]:
    """The findings of one jsonschema.ValidationError, each with its place in the document."""
    key, value, wanted = _dotted(path), error.instance, error.validator_value
    if error.validator == "additionalProperties":
        for unknown in (name for name in value if name not in error.schema["properties"]):
            place = _dotted((*path, str(unknown)))
            yield (*path, unknown), _unknown_key(schema, error.schema, place, str(unknown), value[unknown])
    elif error.validator == "required":
        for missing in (name for name in wanted if name not in value):
            choices = error.schema["properties"][missing]["enum"]
            problem = f"missing key: expected one of {_list(choices)}"
            yield (*path, missing), Finding("missing-key", ERROR, _dotted((*path, missing)), problem, "add one of them")
    elif error.validator == "type":
        words = [WORDS[kind] for kind in ([wanted] if isinstance(wanted, str) else wanted)]
        problem = f"expected {' or '.join(words)}, found {value!r}"
        yield path, Finding("wrong-type", ERROR, key, problem, f"give {words[0]}")
    elif error.validator == "enum":
        yield path, _unknown_value(error.schema, key, value)
    elif error.validator == "minItems":
        yield (
            path,
            Finding("out-of-range", ERROR, key, f"expected at least {wanted} of them, found none", "leave it out"),
        )
    else:
        bound = f"{BOUNDS[error.validator]} {wanted:g}"
        yield path, Finding("out-of-range", ERROR, key, f"expected {bound}, found {value}", f"give {bound}")


def _unknown_key(schema: Schema, definition: dict[str, Any], key: str, name: str, value: object) -> Finding:
    if key == name and (new := renamed_flags().successor(schema.runtime, name)) is not None:
        return _renamed(schema, name, new)
    if known := _held(value, definition["properties"]):
        problem = f"no key of {definition['title']} ({schema}), and it holds {cut(', '.join(known))}, which are"
        return Finding("nested-keys", ERROR, key, problem, "move them out of it")
    near = _slip(name, definition["properties"])
    source = definition["x-source"]["version"]
    elsewhere = source != schema.release
    read = f", whose keys were read at {source}" if elsewhere else ""
    # A word like no other may be a key that came with the release; a slip of the pen resembles one.
    severity = WARNING if elsewhere and near is None else ERROR
    problem = f"not known to this schema: no key of {definition['title']} ({schema}{read})"
    return Finding("unknown-key", severity, key, problem, _write(near, "look it up in the documents of your release"))


def _renamed(schema: Schema, name: str, new: str) -> Finding:
    """An argument of earlier releases: refused, or still read."""
    if name in renamed_flags().deprecated.get(schema.runtime, {}):
        problem = f"expected {new}, found an argument that the release reads and will drop"
        return Finding("renamed-key", WARNING, name, problem, f"write {new}")
    problem = f"expected {new}, found an argument of earlier releases, which {schema} refuses"
    return Finding("renamed-key", ERROR, name, problem, f"write {new}")


def _held(value: object, properties: dict[str, Any]) -> list[str]:
    """Known keys within the value of an unknown one, a mapping or the JSON of one."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ConfigError):
            value = json_document(value.encode(), "value", ConfigError)
    names = [str(key).replace("-", "_") for key in value] if isinstance(value, dict) else []
    return [name for name in names if name in properties]


def _unknown_value(described: dict[str, Any], key: str, value: object) -> Finding:
    choices = [choice for choice in described["enum"] if choice is not None]
    words = [choice for choice in choices if isinstance(choice, str)]
    near = _nearest_word(value, words) if isinstance(value, str) else None
    if (later := described.get("x-newer", {}).get(value) if isinstance(value, str) else None) is not None:
        problem = f"expected one of {_list(choices)}, found {value!r}, which came later ({later})"
        return Finding("unknown-value", WARNING, key, problem, "choose one of them, or check that your release has it")
    is_open = described.get("x-open", False)  # the runtime may know more than the schema describes
    severity = WARNING if is_open and near is None else ERROR
    fix = _write(near, "check its keys by hand" if is_open else "choose one of them")
    return Finding("unknown-value", severity, key, f"expected one of {_list(choices)}, found {value!r}", fix)


def _nearest_word(value: str, words: list[str]) -> str | None:
    """Word that differs in case only, else by one letter."""
    return next((word for word in words if word.lower() == value.lower()), None) or _slip(value, words)


def _slip(word: str, valid: Iterable[str]) -> str | None:
    """The single valid name at edit distance 1 from `word`: no other feature's."""
    near = [each for each in valid if _is_slip(word, each)]
    return near[0] if len(near) == 1 else None


def _is_slip(word: str, valid: str) -> bool:
    start = _num_alike(word, valid)
    left, right = word[start:], valid[start:]
    end = _num_alike(left[::-1], right[::-1])
    left, right = left[: len(left) - end], right[: len(right) - end]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])


def _num_alike(left: str, right: str) -> int:
    """Number of leading letters that both have."""
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


def _position(document: dict[str, Any], path: Path) -> list[int]:
    """Where a path stands in its document; what is missing stands before the rest of its mapping."""
    position, value = [], document
    for key in path:
        names = list(value) if isinstance(value, dict) else range(len(value))
        position.append(names.index(key) if key in names else -1)
        value = value[key] if key in names else {}
    return position


def _dotted(path: Path) -> str:
    """('a', 'b', 1) -> 'a.b[1]'."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _list(choices: list[Any]) -> str:
    return ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)


def _write(near: str | None, otherwise: str) -> str:
    return f"write {near}" if near else otherwise
