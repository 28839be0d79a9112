# SPDX-License-Identifier: Apache-2.0
"""Constructors whose arguments are the fields of a struct, for callers, editors and type checkers alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, get_type_hints

Fields = ParamSpec("Fields")
Arguments = TypeVar("Arguments")
Self = TypeVar("Self")


def takes(
    arguments: Callable[Fields, Arguments],
) -> Callable[[Callable[[Self, Arguments], None]], Callable[Concatenate[Self, Fields], None]]:
    """Gives a constructor the signature of the struct `arguments`, of which it receives an instance."""
    types, signature = get_type_hints(arguments), inspect.signature(arguments)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *(each.replace(annotation=types[name]) for name, each in signature.parameters.items())]

    def decorate(construct: Callable[[Self, Arguments], None]) -> Callable[Concatenate[Self, Fields], None]:
        @wraps(construct)
        def with_fields(self: Self, /, *args: Fields.args, **settings: Fields.kwargs) -> None:
            construct(self, arguments(*args, **settings))

        with_fields.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_fields

    return decorate
