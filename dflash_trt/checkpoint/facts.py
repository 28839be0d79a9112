# SPDX-License-Identifier: Apache-2.0
"""Reads model facts from a checkpoint's JSON files: a missing fact, or one of the wrong type, is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dflash_trt.errors import CheckpointError, cut
from dflash_trt.files.json_file import MAX_BYTES, json_object
from dflash_trt.files.read import NUM_BYTES, foreign_content, read_bytes

MAX_INTEGER = 2**31 - 1  # sizes, positions and token ids are INT32 in the graphs
MIN_NUMBER, MAX_NUMBER = 1.2e-38, 3.4e38  # FLOAT's range, the type of the graphs' constants
CONFLICT = "the two contradict each other: keep the one that the draft was trained with"
T = TypeVar("T")


class Facts:
    """A JSON object of a file, read key by key; every error names file, key, expectation and finding.

    It remembers which keys were read, together with its sections and with what `replaced` returns.
    """

    def __init__(
        self, values: dict[str, object], file: Path, scope: str = "", *, was_read: set[str] | None = None
    ) -> None:
        self._values = values
        self.file = file
        self._scope = scope
        self._was_read = set[str]() if was_read is None else was_read

    @classmethod
    def load(cls, file: Path, *, what: str = "a JSON object", hint: str | None = None) -> Facts:
        """Reads `file`; raises CheckpointError when it is missing, unreadable or not a JSON object, called `what`."""
        if not file.exists():
            raise CheckpointError(
                f"{file}: no such file: expected a model configuration", hint="check the path to the checkpoint"
            )
        content = read_bytes(file, CheckpointError, limit=MAX_BYTES)
        if (found := foreign_content(content[:NUM_BYTES])) is not None:
            raise CheckpointError(f"{file} is {found[0]}, not {what}", hint=found[1])
        # transformers writes Infinity into some configurations; a number that is read here is finite.
        return cls(json_object(content, file, CheckpointError, what=what, hint=hint, finite=False), file)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> set[str]:
        """The keys that have a value (null counts as absent)."""
        return {key for key in self._values if key in self}

    def values(self) -> dict[str, object]:
        """A copy of the whole object, as it stands in the file."""
        return dict(self._values)

    def peek(self, key: str) -> dict[str, object]:
        """The object at `key`, empty where there is none; it does not count as read."""
        found = self._values.get(key)
        return found if isinstance(found, dict) else {}

    def replaced(self, **values: object) -> Facts:
        """Facts with these values replaced or added."""
        return Facts(self._values | values, self.file, self._scope, was_read=self._was_read)

    def unread(self) -> list[str]:
        """The keys, sorted, of which no value has been read so far."""
        return sorted(key for key in self.keys() if f"{self._scope}{key}" not in self._was_read)

    def holds(self, key: str, value: object) -> bool:
        """Whether the value at `key` equals `value` in value and type; it does not count as read."""
        found = self._values.get(key)
        return found == value and isinstance(found, bool) == isinstance(value, bool)

    def equals(self, key: str, value: object) -> bool:
        """Whether the value at `key` equals `value` in value and type; it counts as read."""
        self._was_read.add(self.path(key))
        return self.holds(key, value)

    def path(self, key: str) -> str:
        """The key with the sections that it lies in."""
        return f"{self._scope}{key}"

    def integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """The integer at `key`, from `minimum` to `maximum`."""
        expected = f"an integer from {minimum} to {maximum}"
        return self._read(key, (int,), expected, lambda value: minimum <= value <= maximum)

    def number(self, key: str, *, default: float | None = None) -> float:
        """The number > 0 at `key`; `default` is for keys whose default the format itself defines."""
        fits: Callable[[float], bool] = lambda value: MIN_NUMBER <= value <= MAX_NUMBER  # noqa: E731
        return float(self._read(key, (int, float), "a number > 0", fits, default=default))

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """The boolean at `key`; `default` is for keys whose default the format itself defines."""
        return self._read(key, (bool,), "true or false", default=default)

    def text(self, key: str, *, choices: tuple[str, ...] = ()) -> str:
        """The string at `key`, one of `choices` if any are given."""
        expected = f"one of {', '.join(choices)}" if choices else "a string"
        return self._read(key, (str,), expected, lambda v: v.isprintable() and (not choices or v in choices))

    def integers(self, key: str) -> tuple[int, ...]:
        """The non-empty list of integers >= 0 at `key`."""
        values = self._read(
            key, (list,), "a list of integers >= 0", lambda v: bool(v) and all(type(i) is int and i >= 0 for i in v)
        )
        return tuple(values)

    def flags(self, key: str) -> tuple[bool, ...]:
        """The list of booleans at `key`."""
        return tuple(self._read(key, (list,), "a list of booleans", lambda v: all(type(i) is bool for i in v)))

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of strings at `key`."""
        return tuple(self._read(key, (list,), "a list of strings", lambda v: all(type(i) is str for i in v)))

    def texts_by_name(self, key: str) -> dict[str, str]:
        """The object at `key`, whose values are strings."""
        return self._read(key, (dict,), "an object of strings", lambda v: all(type(i) is str for i in v.values()))

    def section(self, key: str) -> Facts:
        """The object at `key`."""
        return Facts(self._read(key, (dict,), "an object"), self.file, f"{self._scope}{key}.", was_read=self._was_read)

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """The result of `read`, one of the methods above, at `key`; None where there is no such key."""
        return read(key) if key in self else None

    def agrees(self, second: Facts, key: str) -> bool:
        """Whether the values of `key` in both do not differ; it counts as read in both."""
        for place in (self, second):
            place._was_read.add(f"{place._scope}{key}")
        return not (key in self and key in second) or self._values[key] == second._values[key]

    def error(self, key: str, expected: str, hint: str | None = None) -> CheckpointError:
        """The error for the value at `key`: the expectation and the finding."""
        if key not in self._values:
            return CheckpointError(f"{self.file}: missing key {self._scope}{cut(key)}: expected {expected}", hint=hint)
        found = cut(json.dumps(self._values[key]))
        return CheckpointError(f"{self.file}: {self._scope}{cut(key)}: expected {expected}, found {found}", hint=hint)

    def conflict(self, key: str, expected: str) -> CheckpointError:
        """The error for a value that contradicts another of the file, where neither is known to be right."""
        return self.error(key, expected, CONFLICT)

    def _read(
        self,
        key: str,
        kinds: tuple[type[T], ...],
        expected: str,
        fits: Callable[[T], bool] = lambda _: True,
        *,
        default: T | None = None,
    ) -> T:
        """The value at `key`, of one of `kinds` exactly (true is no integer) and within `fits`."""
        self._was_read.add(f"{self._scope}{key}")
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        for kind in kinds:
            if type(value) is kind and fits(value):
                return value
        raise self.error(key, expected)
