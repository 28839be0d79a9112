# SPDX-License-Identifier: Apache-2.0
"""Changes of a launch command's arguments and variables in a script; the rest of the text stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.deploy.command_text import flag_words
from dflash_trt.deploy.flags import argument_words
from dflash_trt.deploy.foreign.named_file import named_text
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.script import Server
from dflash_trt.deploy.shell_words import Word
from dflash_trt.deploy.trtllm_serve import file_words
from dflash_trt.deploy.yaml_edits import with_value
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
