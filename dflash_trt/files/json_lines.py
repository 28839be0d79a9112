# SPDX-License-Identifier: Apache-2.0
"""JSON from outside, one value a line, read line by line: the file may be large, no line may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from dflash_trt.errors import DFlashError
from dflash_trt.files.json_file import MAX_BYTES, json_value
from dflash_trt.files.read import open_file

T = TypeVar("T")


def read_json_lines(
    file: Path,
    kind: type[T],
    error: type[DFlashError],
    *,
    what: str,
    hint: str | None = None,
    may_be_pipe: bool = False,
) -> Iterator[tuple[str, T]]:
    """Each line's place ("FILE:3") and value; blank lines are passed over. Raises `error` as `read_json` does."""
    with open_file(file, error, may_be_pipe=may_be_pipe, hint=hint) as stream:
        number = 0
        while line := stream.readline(MAX_BYTES + 1):
            number += 1
            where = f"{file}:{number}"
            if len(line) > MAX_BYTES:
                raise error(f"{where}: expected a line of at most {MAX_BYTES} bytes, found more", hint=hint)
            if line.strip():
                yield where, json_value(line, where, kind, error, what=what, hint=hint)
