# SPDX-License-Identifier: Apache-2.0
"""Results of a long command, one a line of a file as they are made: stopped at any moment, it goes on from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from dflash_trt.errors import BuildError
from dflash_trt.files.json_file import json_value
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import as_build_error

OPTION = "-o FILE"
MAX_BYTES = 2**32  # a hundred thousand answers of a thousand tokens have 0.7 GB


def journal_file(output: Path) -> Path:
    """File of what an unfinished command for `output` has done."""
    return output.parent / f"{output.name}.journal"


class Keyed(Protocol):
    """A result that is found by its key."""

    @property
    def key(self) -> str:
        """Names the result among those of one command."""


Entry = TypeVar("Entry", bound=Keyed)


class Journal(Generic[Entry]):
    """Entries in a JSON Lines file; a last line that a kill cut off is made again."""

    def __init__(self, file: Path, fingerprint: str, kind: type[Entry], *, of: str) -> None:
        """`kind` is a struct of msgspec; `fingerprint`, one line, says what decides its values, and `of` in words.

        BuildError where the file has entries of something else, or it or a later entry cannot be written.
        """
        self._file = file
        self.entries: dict[str, Entry] = {}
        lines = read_bytes(file, BuildError, limit=MAX_BYTES).split(b"\n")[:-1] if file.exists() else []
        if lines and lines[0].decode(errors="replace") != fingerprint:
            raise BuildError(
                f"{file}: expected {of}, found others",
                hint=f"remove {file}, or give the options that it was begun with",
            )
        for number, line in enumerate(lines[1:], start=2):
            entry = json_value(line, f"{file}, line {number}", kind, BuildError, what="an entry")
            self.entries[entry.key] = entry
        with as_build_error(file, OPTION):
            if lines:
                os.truncate(file, sum(len(line) + 1 for line in lines))  # a line cut off by a kill
            else:
                file.write_text(f"{fingerprint}\n")

    def record(self, entry: Entry) -> None:
        """Adds an entry."""
        self.entries[entry.key] = entry
        with as_build_error(self._file, OPTION), self._file.open("ab") as stream:
            stream.write(msgspec.json.encode(entry) + b"\n")

    def measure(self, key: str, measure: Callable[[], Entry]) -> Entry:
        """Entry of `key` from the file, or from `measure`, which is then recorded."""
        if key not in self.entries:
            self.record(measure())
        return self.entries[key]

    def remove(self) -> None:
        """Deletes the file: its command is complete."""
        self._file.unlink()
