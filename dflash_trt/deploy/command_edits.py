# SPDX-License-Identifier: Apache-2.0
"""Changes of a launch command's arguments and variables, and of values in YAML; the rest of a text stays as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.deploy.command_text import flag_words
from dflash_trt.deploy.flags import argument_words
from dflash_trt.deploy.foreign.named_file import named_text
from dflash_trt.deploy.runtime_arguments import nested
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.script import Server
from dflash_trt.deploy.shell_words import Word
from dflash_trt.deploy.trtllm_serve import file_words
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line

Edit = tuple[int, int, str]


def edited(text: str, file: Path, server: Server | None, schema: Schema, changes: dict[str, Any]) -> str:
    """`text` with these settings; None removes one."""
    if server is None:
        return _with_values(text, changes)
    arguments = {key: value for key, value in changes.items() if not key.isupper()}
    edits = [_variable(server, key, value) for key, value in changes.items() if key.isupper()]
    if schema.runtime == "trtllm":
        edits += _file_edits(text, file, server, arguments)
    else:
        edits += _flag_edits(text, server, schema, arguments)
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _with_values(text: str, changes: dict[str, Any]) -> str:
    for key, value in changes.items():
        text = with_value(text, key, value)
    return text


def _variable(server: Server, name: str, value: str) -> Edit:
    """A variable before the command, or of the container that it starts."""
    first = server.command[0]
    if first.rpartition("/")[2] in ("docker", "podman", "nerdctl"):
        run = server.command[server.command.index("run")]  # type: ignore[arg-type]
        return run.end, run.end, f" --env {name}={value}"
    return first.begin, first.begin, f"{name}={value} "


def _flag_edits(text: str, server: Server, schema: Schema, changes: dict[str, Any]) -> Iterator[Edit]:
    words = [word for word in server.words if isinstance(word, Word)]
    places = list(argument_words(server.words, schema))
    added = []
    for key, value in changes.items():
        flags = [] if value is None else flag_words(schema.runtime, {key: value})
        written = command_line(flags)
        for found, start, end in places:
            if found == key:
                begin = words[start].begin
                if not written:  # with the space before it
                    begin = max((each.end for each in server.command if each.end <= begin), default=begin)
                yield begin, words[end - 1].end, written
                written = ""
        added += [written] if written else []
    last = max(word.end for word in server.command)
    several = re.search(r"\\\n[ \t]*", text[server.command[0].begin : last])
    separator = f" {several[0]}" if several else " "
    yield last, last, "".join(f"{separator}{flag}" for flag in added)


def _file_edits(text: str, file: Path, server: Server, changes: dict[str, Any]) -> Iterator[Edit]:
    """The YAML that trtllm-serve reads, changed where the script writes it, else written by the script anew."""
    if not changes:
        return
    named = list(file_words(server.words))
    if named and isinstance(document := server.files.get(named[-1][1]), Word):
        raw = text[document.begin : document.end]
        yield document.begin, document.end, _with_values(raw, changes)
        return
    new_name, old = "dflash.yaml", ""
    if named:
        index, name = named[-1]
        path, word = Path(name), server.words[index]
        new_name, found = str(path.with_name(f"{path.stem}.dflash{path.suffix}")), named_text(name, server.files, file)
        if found is None:
            raise ConfigError(f"{file} names {name}, outside its folder", hint="copy it there, and name the copy")
        old = found
        assert isinstance(word, Word)
        yield word.begin, word.end, command_line([word.replace(name, new_name)])
    else:
        last = max(each.end for each in server.command)
        yield last, last, f" --config {new_name}"
    start = _first_command(text)
    written = _with_values(old, changes).rstrip("\n")
    yield start, start, f"cat > {command_line([new_name])} <<'EOF'\n{written}\nEOF\n"


def _first_command(text: str) -> int:
    """Position after the comments at a script's head, which Slurm and the kernel read."""
    position = 0
    for line in text.splitlines(keepends=True):
        if line.strip() and not line.startswith("#"):
            break
        position += len(line)
    return position


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
