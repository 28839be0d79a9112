# SPDX-License-Identifier: Apache-2.0
"""Patterns and formats that a schema makes one text match at once: compile time doubles with each.

llguidance 1.9.1 has no limit that ends such a compilation; 14 took 0.08 s, 30 had not ended after 10 minutes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

MAX_INTERSECTED = 8
MAX_VISITS = 5000
"""Schemas to visit, each as often as references lead to it; a schema with more counts as intersecting too much."""


def most_intersected(root: dict[str, Any]) -> int:
    """Largest number of patterns and formats that one text must match, MAX_VISITS where that takes too long to find."""
    if not _merges(root):
        return 1
    counter = _Counter(root)
    try:
        return max(counter.count(root, ()).values(), default=0)
    except _TooLargeError:
        return MAX_VISITS


def _merges(root: dict[str, Any]) -> bool:
    """Whether any part of a schema combines schemas that have to hold together."""
    pending: list[object] = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            in_place = part.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
            if "allOf" in part or len(in_place) > 1 or (in_place and part.keys() & {"pattern", "format", "properties"}):
                return True
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return False


class _TooLargeError(Exception):
    pass


class _Counter:
    """Counts patterns and formats by the place of a text in the answer, along one way through the alternatives."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_visits = 0

    def count(self, schema: object, open_references: tuple[str, ...]) -> Counter[str]:
        """Counts of a schema by place; a reference inside itself adds nothing."""
        self._num_visits += 1
        if self._num_visits > MAX_VISITS:
            raise _TooLargeError
        counts: Counter[str] = Counter()
        if not isinstance(schema, dict):
            return counts
        counts[""] = ("pattern" in schema) + ("format" in schema)
        for inner in schema.get("allOf", ()):
            counts.update(self.count(inner, open_references))
        for keyword in ("anyOf", "oneOf"):
            alternatives: Counter[str] = Counter()
            for inner in schema.get(keyword, ()):
                alternatives |= self.count(inner, open_references)
            counts.update(alternatives)
        if (reference := schema.get("$ref")) is not None and reference not in open_references:
            counts.update(self.count(resolved(self._root, reference), (*open_references, reference)))
        for place, inner in _members(schema):
            below = self.count(inner, open_references)
            counts.update({f"{place}{rest}": number for rest, number in below.items()})
        return counts


def _members(schema: dict[str, Any]) -> list[tuple[str, object]]:
    """Places and schemas of the members of objects and arrays; all that have no name of their own share one place."""
    members = [(f"/{name}", inner) for name, inner in schema.get("properties", {}).items()]
    members += [("/*", inner) for inner in schema.get("patternProperties", {}).values()]
    for keyword in ("additionalProperties", "additionalItems", "items", "prefixItems"):
        inner = schema.get(keyword, ())
        members += [("/*", item) for item in inner] if isinstance(inner, list) else [("/*", inner)]
    return members


def resolved(root: dict[str, Any], reference: str) -> object:
    """Schema that a $ref names by a plain JSON pointer; None if it names none."""
    place: object = root
    if not reference.startswith("#/") or "~" in reference or "%" in reference:
        return root if reference == "#" else None
    for key in reference[2:].split("/"):
        if isinstance(place, dict):
            place = place.get(key)
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place
