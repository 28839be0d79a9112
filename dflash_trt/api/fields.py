# SPDX-License-Identifier: Apache-2.0
"""Settings in structs: the bounds of numbers, their checks, and the descriptions that front ends show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from dflash_trt.errors import RequestError, shown


class Bounds(NamedTuple):
    """Values that a number may have; annotates the field of a struct."""

    low: float
    high: float
    expected: str
    """The bounds in words, for errors."""


class NumberField(NamedTuple):
    """A number among the fields of a struct."""

    type: type[int] | type[float]
    default: float | None
    bounds: Bounds


def number_fields(struct: type[msgspec.Struct]) -> dict[str, NumberField]:
    """The fields of `struct` that have Bounds, by name."""
    return {
        field.name: NumberField(float if kind is float else int, field.default, bounds)
        for field in msgspec.structs.fields(struct)
        if get_origin(field.type) is Annotated
        for kind, bounds in [get_args(field.type)[:2]]
        if isinstance(bounds, Bounds)
    }


def descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The description of each field of `struct` that has one, by name."""
    return {name: note.description for name, note in _notes(struct) if note.description}


def metavars(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The placeholder of each field's value in help, by name, where the field has one."""
    return {name: note.extra["metavar"] for name, note in _notes(struct) if note.extra}


def _notes(struct: type[msgspec.Struct]) -> Iterator[tuple[str, msgspec.Meta]]:
    for field in msgspec.structs.fields(struct):
        for note in getattr(field.type, "__metadata__", ()):
            if isinstance(note, msgspec.Meta):
                yield field.name, note


def checked_number(name: str, value: Any, field: NumberField) -> float:
    """`value` as a number of Python; RequestError, with the field's name, for another type or out of bounds."""
    low, high, expected = field.bounds
    kind, noun = (Integral, "an integer") if field.type is int else (Real, "a number")
    is_number = type(value) is field.type or (isinstance(value, kind) and not isinstance(value, bool))
    if not is_number:
        raise refusal(name, f"{noun}, {expected}", value)
    try:
        number = field.type(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        raise refusal(name, expected, int(value) if is_whole else value)
    return number


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python or numpy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def refusal(name: str, expected: str, found: object) -> RequestError:
    """Error for a setting's value: "NAME: expected EXPECTED, found FOUND"."""
    return RequestError(f"{name}: expected {expected}, found {shown(found)}")
