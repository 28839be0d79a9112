# SPDX-License-Identifier: Apache-2.0
"""Reads model facts from config.json: a fact is there with the right type, or it is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from dflash_trt.errors import CheckpointError

MAX_INTEGER = 2**31 - 1  # sizes, positions and token ids are INT32 in the graphs
MIN_NUMBER, MAX_NUMBER = 1.2e-38, 3.4e38  # FLOAT's range, the type of the graphs' constants
MAX_FOUND_CHARACTERS = 200  # of a value that an error quotes


class Facts:
    """A JSON object of a file, read key by key; every error names file, key, expectation and finding."""

    def __init__(self, values: dict[str, object], file: Path, scope: str = "") -> None:
        self._values = values
        self.file = file
        self._scope = scope

    @classmethod
    def load(cls, file: Path) -> Facts:
        """Reads `file`; raises CheckpointError when it is missing, unreadable or not a JSON object."""
        try:
            values = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: expected a model configuration, found no such file",
                hint="check the path to the checkpoint",
            ) from None
        except OSError as error:
            raise CheckpointError(f"{file}: expected a readable file, found: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or absurdly long or deep
            raise CheckpointError(f"{file}: expected JSON, found {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: expected a JSON object, found {type(values).__name__}")
        return cls(values, file)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> set[str]:
        """The keys that have a value (null counts as absent)."""
        return {key for key in self._values if key in self}

    def integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """The integer at `key`, from `minimum` to `maximum`."""

        def fits(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum

        value = self._read(key, f"an integer from {minimum} to {maximum}", fits)
        assert isinstance(value, int)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """The number > 0 at `key`; `default` is for keys whose default the format itself defines."""

        def fits(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and MIN_NUMBER <= value <= MAX_NUMBER

        if default is not None and key not in self:
            return float(default)
        value = self._read(key, "a number > 0", fits)
        assert isinstance(value, (int, float))
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """The boolean at `key`; `default` is for keys whose default the format itself defines."""
        if default is not None and key not in self:
            return default
        value = self._read(key, "true or false", lambda value: isinstance(value, bool))
        assert isinstance(value, bool)
        return value

    def text(self, key: str, *, choices: tuple[str, ...] = ()) -> str:
        """The string at `key`, one of `choices` if any are given."""
        expected = f"one of {', '.join(choices)}" if choices else "a string"

        def fits(value: object) -> bool:
            return isinstance(value, str) and value.isprintable() and (not choices or value in choices)

        value = self._read(key, expected, fits)
        assert isinstance(value, str)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """The non-empty list of integers >= 0 at `key`."""

        def fits(value: object) -> bool:
            return (
                isinstance(value, list)
                and bool(value)
                and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
            )

        value = self._read(key, "a list of integers >= 0", fits)
        assert isinstance(value, list)
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of strings at `key`."""

        def fits(value: object) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        value = self._read(key, "a list of strings", fits)
        assert isinstance(value, list)
        return tuple(value)

    def agrees(self, other: Facts, key: str) -> bool:
        """Whether `key` does not stand in both with different values."""
        return not (key in self and key in other) or self._values[key] == other._values[key]

    def section(self, key: str) -> Facts:
        """The object at `key`."""
        value = self._read(key, "an object", lambda value: isinstance(value, dict))
        assert isinstance(value, dict)
        return Facts(value, self.file, f"{self._scope}{key}.")

    def error(self, key: str, expected: str, hint: str | None = None) -> CheckpointError:
        """The error for the value at `key`: what was expected there and what was found."""
        found = json.dumps(self._values[key]) if key in self._values else "no such key"
        if len(found) > MAX_FOUND_CHARACTERS:
            found = f"{found[:MAX_FOUND_CHARACTERS]}..."
        return CheckpointError(f"{self.file}: {self._scope}{key}: expected {expected}, found {found}", hint=hint)

    def _read(self, key: str, expected: str, fits: Callable[[object], bool]) -> object:
        value = self._values.get(key)
        if not fits(value):
            raise self.error(key, expected)
        return value
