# SPDX-License-Identifier: Apache-2.0
"""Changes of single values in YAML text; the rest of the text stays as it is."""

from __future__ import annotations

import math
from typing import Any

import yaml

from dflash_trt.deploy.runtime_arguments import nested


def with_value(text: str, path: str, value: Any) -> str:
    """The text of a mapping, with the value at a path of one key or two in place of what it has there, or added."""
    outer, _, inner = path.partition(".")
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):  # empty
        return f"{text.rstrip()}\n{_block(nested(path, value))}\n".lstrip("\n")
    section = next((found for key, found in root.value if key.value == outer), None)
    if inner and isinstance(section, yaml.MappingNode):
        return _put(text, section, inner, value)
    return _put(text, root, outer, {inner: value} if inner else value)


def _put(text: str, mapping: yaml.MappingNode, key: str, value: Any) -> str:
    is_flow = mapping.flow_style
    written = _flow({key: value})[1:-1] if is_flow else _block({key: value}, mapping.start_mark.column)
    place = next((entry for entry in mapping.value if entry[0].value == key), None)
    if place is not None:
        return text[: place[0].start_mark.index] + written + text[_end(text, place[1]) :]
    if is_flow:
        end = mapping.end_mark.index - 1
        return f"{text[:end].rstrip()}{', ' if mapping.value else ''}{written}{text[end:]}"
    line_end = text.find("\n", _end(text, mapping)) % (len(text) + 1)
    return f"{text[:line_end]}\n{' ' * mapping.start_mark.column}{written}{text[line_end:]}"


def _end(text: str, node: yaml.Node) -> int:
    """Position after the last value; the parser's own end of a block comes after the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end(text, node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end(text, node.value[-1])
    end: int = node.end_mark.index
    return len(text[:end].rstrip())


def _block(value: dict[str, Any], column: int = 0) -> str:
    lines = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=120).splitlines()
    return f"\n{' ' * column}".join(lines)


def _flow(value: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=math.inf)
    return text.strip()
