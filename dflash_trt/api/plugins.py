# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: entry points of installed distributions, whose errors are named as theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dflash_trt.errors import DFlashError, PluginError, RequestError, first_line
from dflash_trt.files.strict_yaml import nearest

DIALECTS = "dflash_trt.dialects"
LOGITS_PROCESSORS = "dflash_trt.logits_processors"
DRAFT_LENGTHS = "dflash_trt.draft_lengths"
ACCEPTANCE_RULES = "dflash_trt.acceptance_rules"
GROUPS = {
    DIALECTS: "dialect",
    LOGITS_PROCESSORS: "logits processor",
    DRAFT_LENGTHS: "draft-length policy",
    ACCEPTANCE_RULES: "acceptance rule",
}
"""Groups of entry points, and a word for what they extend (docs/structure.md)."""


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """The plug-ins of a group, by name; none of them is loaded."""
    return tuple(sorted(entry_points(group=group), key=lambda entry: entry.name))


def described(entry: EntryPoint) -> str:
    """`acceptance rule of my-package 1.0`."""
    source = "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{GROUPS[entry.group]} of {source}"


def loaded(entry: EntryPoint) -> Any:
    """The object that a plug-in's entry point names; PluginError where it cannot be imported."""
    with blamed(entry):
        return entry.load()


def plugin(group: str, name: str) -> EntryPoint | None:
    """The plug-in of that name; None where no distribution brings it."""
    return next((entry for entry in installed(group) if entry.name == name), None)


def chosen(group: str, name: str, setting: str, own: tuple[str, ...]) -> EntryPoint:
    """The plug-in that a setting names; RequestError, with the nearest name, where there is none."""
    if (entry := plugin(group, name)) is not None:
        return entry
    names = [*own, *(each.name for each in installed(group))]
    near = nearest(name, names)
    raise RequestError(
        f"{setting}: no {GROUPS[group]} is called {name}; there are {', '.join(names)}",
        hint=f"did you mean {near}?" if near else f"plug-ins are entry points of the group {group}",
    )


@contextmanager
def blamed(entry: EntryPoint, *, error: type[DFlashError] = PluginError) -> Iterator[None]:
    """Turns any other exception of a plug-in into one that names it."""
    try:
        yield
    except DFlashError:
        raise
    except Exception as problem:
        name = "the distribution" if entry.dist is None else entry.dist.name
        raise error(
            f"the plug-in {entry.name} ({described(entry)}) failed: {type(problem).__name__}: {first_line(problem)}",
            hint=f"report it to the authors of {name}, or pip uninstall {name}",
        ) from problem


def expect(entry: EntryPoint, found: object, kind: type) -> None:
    """PluginError where a plug-in's object is of another type."""
    if not isinstance(found, kind):
        raise PluginError(
            f"the plug-in {entry.name} ({described(entry)}): expected a {kind.__name__}, found {type(found).__name__}"
        )
