# SPDX-License-Identifier: Apache-2.0
"""JSON from outside, read strictly: what would be dropped, guessed or too much to hold is refused in one error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from dflash_trt.errors import ConfigError, DFlashError, shown
from dflash_trt.files.read import decode, open_file, read_bytes

MAX_BYTES = 64 * 2**20  # the largest published index, Kimi-K2's, has 14 MiB
MAX_VALUES = 1_000_000  # one costs up to 350 bytes in memory
MAX_DEPTH = 64
INTEGERS = range(-(2**63), 2**64)
MAX_DIGITS = 20  # of such an integer, with its sign
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
T = TypeVar("T")


class SchemaVersion(msgspec.Struct):
    """Version of a document, read before the rest."""

    schema_version: int


def json_document(
    content: bytes,
    where: object,
    error: type[DFlashError],
    *,
    what: str = "a JSON document",
    hint: str | None = None,
    finite: bool = True,
) -> object:
    """The JSON value that is `content`, found at `where` (a file, or a place in it).

    Raises `error`, saying that `what` was expected, for what is not UTF-8 and JSON, a key twice, integers beyond 64
    bits, halves of surrogate pairs, and more than MAX_DEPTH levels or MAX_VALUES values; where `finite`, also for NaN
    and infinity.
    """

    def refuse(found: str) -> NoReturn:
        raise error(f"{where}: expected {what}, found {found}", hint=hint)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"{where}: expected {what} with each key once, found {shown(twice)} twice", hint=hint)
        return entries

    def integer(text: str) -> int:
        if len(text) > MAX_DIGITS or int(text) not in INTEGERS:
            refuse(f"an integer of {len(text.lstrip('-'))} digits, beyond 64 bits")
        return int(text)

    def number(text: str) -> float:
        if finite and not math.isfinite(float(text)):
            refuse(f"the number {text[:MAX_DIGITS]}, which is not finite")
        return float(text)

    if (count := sum(content.count(mark) for mark in (b"[", b"{", b","))) > MAX_VALUES:
        refuse(f"{count} values, more than {MAX_VALUES}")
    text = decode(content, where, error, what=what, hint=hint)
    try:
        document: object = json.loads(
            text, object_pairs_hook=unique, parse_int=integer, parse_float=number, parse_constant=number
        )
    except ValueError as problem:
        refuse(f"text that is not JSON ({problem})")
    except RecursionError:
        refuse(f"more than {MAX_DEPTH} levels")
    if _is_deep(document):
        refuse(f"more than {MAX_DEPTH} levels")
    if SURROGATE.search(text) and (half := _surrogate(document)):
        refuse(f"half of a surrogate pair, {half}")
    return document


def json_object(
    content: bytes,
    where: object,
    error: type[DFlashError],
    *,
    what: str = "a JSON object",
    hint: str | None = None,
    finite: bool = True,
) -> dict[str, object]:
    """`json_document` that is an object; `error` for anything else."""
    document = json_document(content, where, error, what=what, hint=hint, finite=finite)
    if not isinstance(document, dict):
        raise error(f"{where}: expected {what}, found {type(document).__name__}", hint=hint)
    return document


def json_value(
    content: bytes, where: object, kind: type[T], error: type[DFlashError], *, what: str, hint: str | None = None
) -> T:
    """`json_document` as `kind`; raises `error`, naming the place, for what `kind` does not describe."""
    document = json_document(content, where, error, what=what, hint=hint)
    try:
        return msgspec.convert(document, kind, strict=True)
    except (msgspec.ValidationError, DFlashError) as problem:
        raise error(f"{where}: expected {what}, found {problem}", hint=hint) from None


def read_json(file: Path, kind: type[T], error: type[DFlashError], *, what: str, hint: str | None = None) -> T:
    """`json_value` of a file's content."""
    return json_value(read_bytes(file, error, limit=MAX_BYTES, hint=hint), file, kind, error, what=what, hint=hint)


def package_data(file: Path, kind: type[T]) -> T:
    """`read_json` of a file that comes with the package; ConfigError."""
    return read_json(file, kind, ConfigError, what="the package's data")


def write_json(file: Path, document: object) -> None:
    """Writes a document, indented, in UTF-8."""
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_deep(document: object) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return False
    return True


def _surrogate(document: object) -> str | None:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as problem:
        return repr(problem.object[problem.start])
    return None


def read_json_lines(
    file: Path,
    kind: type[T],
    error: type[DFlashError],
    *,
    what: str,
    hint: str | None = None,
    may_be_pipe: bool = False,
) -> Iterator[tuple[str, T]]:
    """Each line's place ("FILE:3") and value, read line by line, blank lines skipped; raises `error`."""
    with open_file(file, error, may_be_pipe=may_be_pipe, hint=hint) as stream:
        number = 0
        while line := stream.readline(MAX_BYTES + 1):
            number += 1
            where = f"{file}:{number}"
            if len(line) > MAX_BYTES:
                raise error(f"{where}: expected a line of at most {MAX_BYTES} bytes, found more", hint=hint)
            if line.strip():
                yield where, json_value(line, where, kind, error, what=what, hint=hint)
