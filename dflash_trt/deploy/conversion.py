# SPDX-License-Identifier: Apache-2.0
"""An existing launch command with a DFlash draft in the place of its speculation; the rest of the text stays.

What changes beside the draft are settings that a check of the new command misses and knows: the table of choices and
the rules (`Finding.settings`). What the command had wrong before is left, and said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dflash_trt.deploy.checker import check, file_configs, text_servers
from dflash_trt.deploy.command_text import flag_words
from dflash_trt.deploy.deployment_file import merged, nested
from dflash_trt.deploy.draft_methods import draft_arguments, native_attention
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.flags import argument_words
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.render import converted_draft, place
from dflash_trt.deploy.rules.checked_config import METHOD_KEYS, CheckedConfig
from dflash_trt.deploy.schema import Runtime, Schema, load_schema, runtime_keys
from dflash_trt.deploy.script import Server
from dflash_trt.deploy.shell_words import Word
from dflash_trt.deploy.sizes import DraftSizes, draft_sizes
from dflash_trt.deploy.trtllm_serve import file_words
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.command import command_line, quoted
from dflash_trt.files.read import read_text
from dflash_trt.files.strict_yaml import MAX_BYTES

SPECULATION = re.compile(r"speculative_.*|num_speculative_tokens|spec_(method|model|tokens)|enable_multi_layer_eagle")
"""Arguments that the draft's replace, in this or an earlier release."""
SGLANG_BLOCK = "speculative_dflash_block_size"
WITH_DRAFTS = ("metrics",)
"""Rules whose settings a command gets also where it was without them before: what shows acceptance."""
KEPT = ("disable_radix_cache",)
"""Settings of which either value works with drafts: a command's own stands."""
MAX_ROUNDS = 4
Edit = tuple[int, int, str]


class Change(msgspec.Struct, frozen=True):
    """One setting that differs."""

    key: str
    """Dotted key, or a variable."""
    value: Any
    """None where it is removed."""
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {'removed' if self.value is None else _shown(self.value)}: {self.why}"


class Conversion(msgspec.Struct, frozen=True):
    """A converted text."""

    schema: Schema
    text: str
    changes: list[Change]
    findings: list[Finding]
    """Findings of the new text."""


def convert(
    text: str, file: Path, *, draft: str, runtime: Runtime | None = None, version: str | None = None,
    target: str | None = None, gpus: Gpus | None = None,
) -> Conversion:  # fmt: skip
    """Put `draft` in the place of other speculation in the one server that `text` starts, or in trtllm's YAML.

    `file` is where the text stands, `target` the target's directory or repository where the text does not show it.
    Raises ConfigError for a text or a draft that cannot be converted; errors of the new text are among its findings.
    """
    server, schema = _server(text, file, runtime, version)
    sizes = _draft(draft)
    read = partial(_config, file=file, schema=schema, gpus=gpus, target=target)
    before = read(text)
    had = {(f.rule, f.key) for f in check(before) if not SPECULATION.match(f.key) and f.rule not in WITH_DRAFTS}
    selected = _selected(before.document, sizes, schema.runtime, draft, file, gpus)
    kind = sizes.spec.kind
    changes = {key: Change(key, value, _replaced(before, key, value, kind)) for key, value in selected.items()}
    for _ in range(MAX_ROUNDS):
        new = _edited(text, file, server, schema, {key: change.value for key, change in changes.items()})
        config = read(new)
        served = msgspec.structs.replace(
            config.served, draft_sizes=sizes, checkpoint=sizes.name, algorithms=sizes.quantized, mode="native",
            num_ranks=1,
        )  # fmt: skip
        config = msgspec.structs.replace(config, served=served)
        findings = check(config)
        more = [f for f in findings if f.key not in KEPT and (f.severity == ERROR or (f.rule, f.key) not in had)]
        mended = {key: Change(key, value, f.problem) for f in more for key, value in f.settings.items()}
        if mended.keys() <= changes.keys():
            break
        changes = changes | {key: change for key, change in mended.items() if key not in changes}
    return Conversion(schema, new, list(changes.values()), findings)


def _replaced(before: CheckedConfig, key: str, value: Any, kind: str) -> str:
    if value is None:
        return f"no argument of {kind}"
    return f"in the place of {_shown(before.document[key])}" if key in before.document else f"argument of {kind}"


def _server(text: str, file: Path, runtime: Runtime | None, version: str | None) -> tuple[Server | None, Schema]:
    """The server to convert, None for YAML, and the schema of its release."""
    found = text_servers(text)
    ours = [server for server in found if runtime in (None, server.runtime)]
    if not ours and not found and runtime == "trtllm":
        return None, load_schema(runtime, version)
    if len(ours) != 1:
        others = f"{len(ours)}" if ours or not found else f"one of {found[0].runtime}"
        raise ConfigError(
            f"{file}: expected one command that starts {runtime or 'vllm, sglang or trtllm-serve'}, found {others}",
            hint="give each command a file of its own; with --runtime trtllm, FILE may be its YAML file",
        )
    if not all(isinstance(word, Word) for word in ours[0].words):
        raise ConfigError(
            f"{file}: expected a command that the script itself starts, found one that is quoted for another shell",
            hint="convert the inner command in a file of its own",
        )
    return ours[0], load_schema(ours[0].runtime, version)


def _draft(name: str) -> DraftSizes:
    if read_num_ranks(Path(name)) is not None:
        raise ConfigError(
            f"--draft: expected a draft checkpoint, found the engine {name}",
            hint=f"dflash-trt serve-config {quoted(Path(name))} --target TARGET --gpus GPUS --runtime trtllm",
        )
    if (sizes := draft_sizes(name, fetches=True)) is None:
        raise ConfigError(
            f"--draft: expected a directory or a Hugging Face repository id, found {shown(name)}",
            hint="check the path to the checkpoint, or look for one: dflash-trt drafts",
        )
    return sizes


def _config(text: str, file: Path, schema: Schema, gpus: Gpus | None, target: str | None) -> CheckedConfig:
    (config,) = file_configs(file, schema, text=text, gpus=gpus, target=target)
    return config


def _selected(
    document: dict[str, Any], sizes: DraftSizes, runtime: Runtime, draft: str, file: Path, gpus: Gpus | None
) -> dict[str, Any]:
    """Arguments of speculation that change, by top-level key; None for those to remove.

    Of a command that already drafts with this method what else it says of drafts stays, K where the block has as many.
    """
    gpu, is_trtllm = None if gpus is None else gpus.gpu, runtime == "trtllm"
    name = (converted_draft(sizes) or place(draft)) if is_trtllm else draft
    most = sizes.spec.num_draft_tokens
    attention = native_attention(sizes, gpu) if is_trtllm and gpu is not None else None
    new = draft_arguments(sizes, runtime, name, most, str(file), gpu=gpu, attention=attention)
    old = {key: value for key, value in document.items() if SPECULATION.fullmatch(key)}
    keys = runtime_keys()[runtime]
    if str(_at(old, METHOD_KEYS[runtime])).lower() == str(_at(new, METHOD_KEYS[runtime])).lower():
        K = _at(old, keys.num_draft_tokens)
        fits = isinstance(K, int) and 0 < K <= most + keys.counts_window
        is_same = _at(old, keys.draft) == name
        wanted = merged(new, old) if is_same else merged(old, new)
        if not is_same and fits:
            wanted = merged(wanted, nested(keys.num_draft_tokens, K))
        if SGLANG_BLOCK in old and keys.num_draft_tokens not in old:
            wanted.pop(keys.num_draft_tokens, None)
        new = wanted
    return {key: new.get(key) for key in new | old if new.get(key) != document.get(key)}


def _at(document: dict[str, Any], path: str) -> Any:
    outer, _, inner = path.partition(".")
    value = document.get(outer)
    return (value.get(inner) if isinstance(value, dict) else None) if inner else value


def _edited(text: str, file: Path, server: Server | None, schema: Schema, changes: dict[str, Any]) -> str:
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
        new_name, old = (
            str(path.with_name(f"{path.stem}.dflash{path.suffix}")),
            read_text(file.parent / name, ConfigError, limit=MAX_BYTES),
        )
        assert isinstance(word, Word)
        yield word.begin, word.end, command_line([word.replace(name, new_name)])
    else:
        last = max(each.end for each in server.command)
        yield last, last, f" --config {new_name}"
    start = _first_command(text)
    written = _with_values(old, changes).rstrip("\n")
    yield start, start, f"cat > {command_line([new_name])} <<'EOF'\n{written}\nEOF\n"


def _first_command(text: str) -> int:
    """Position behind the comments at a script's head, which tell Slurm and the kernel how it is run."""
    position = 0
    for line in text.splitlines(keepends=True):
        if line.strip() and not line.startswith("#"):
            break
        position += len(line)
    return position


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, (dict, list, bool)) else str(value)


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
    """Position behind the last value; the parser's own end of a block is behind the comments that follow it."""
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
