# SPDX-License-Identifier: Apache-2.0
"""Template files in templates/, whose places <name> are filled with values quoted for a shell or for YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.files.command import command_line

Manifest = dict[str, Any]
TEMPLATES = Path(__file__).parent / "templates"
PLACE = re.compile(r"<([a-z_]+)>")
PLACE_LINE = re.compile(r"^<([a-z_]+)>\n", re.MULTILINE)


class Text(str):
    """Shell text that is inserted as it is; every other string becomes one quoted word."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes no aliases, and multi-line texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def shell_text(template: str, **values: str | int | list[str]) -> str:
    """A shell template with its places filled; a line that is an empty place alone is left out."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    assert values.keys() == set(PLACE.findall(text)), f"{template}: values are not those of its places"
    words = {name: _shell(value) for name, value in values.items()}
    text = PLACE_LINE.sub(lambda match: match[0] if words[match[1]] else "", text)
    return PLACE.sub(lambda match: words[match[1]], text)


def _shell(value: str | int | list[str]) -> str:
    if isinstance(value, (Text, int)):
        return str(value)
    return command_line([value] if isinstance(value, str) else value)


def manifest(template: str, **values: Any) -> Manifest:
    """A YAML template as a mapping, its places filled.

    A place takes any value: None leaves its entry out, and a list within a list adds its items.
    """
    filled: Manifest = _filled(yaml.safe_load((TEMPLATES / template).read_text(encoding="utf-8")), values)
    return filled


def _filled(node: Any, values: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: value for key, child in node.items() if (value := _filled(child, values)) is not None}
    if isinstance(node, list):
        filled = (_filled(child, values) for child in node)
        return [
            item for value in filled for item in (value if isinstance(value, list) else [value]) if item is not None
        ]
    place = PLACE.fullmatch(node) if isinstance(node, str) else None
    return node if place is None else values[place[1]]


def yaml_text(manifests: list[Manifest]) -> str:
    """Several documents as one text."""
    text: str = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)
    return text
