# SPDX-License-Identifier: Apache-2.0
"""Replaces the speculation of an existing launch command by a DFlash draft; the rest of the text stays.

Other changes are settings that a check of the new command finds missing and knows: from the table of choices and the
rules (`Finding.settings`). Problems that the command would have without drafts, too, are left and reported.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.command_edits import edited
from dflash_trt.deploy.draft_methods import draft_arguments, native_attention
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.runtime_arguments import merged, nested
from dflash_trt.deploy.schema import Runtime, Schema, load_schema, runtime_keys
from dflash_trt.deploy.script import Server, text_servers
from dflash_trt.deploy.shell_words import Word
from dflash_trt.deploy.sizes import DraftSizes, draft_sizes
from dflash_trt.deploy.trtllm_arguments import converted_draft, place
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.command import quoted

SPECULATION = re.compile(r"speculative_.*|num_speculative_tokens|spec_(method|model|tokens)|enable_multi_layer_eagle")
"""Arguments that the draft's replace, in this or an earlier release."""
SGLANG_BLOCK = "speculative_dflash_block_size"
WITH_DRAFTS = ("metrics",)
"""Rules whose settings a command gets also where it was without them before: what shows acceptance."""
KEPT = ("disable_radix_cache",)
"""Settings of which either value works with drafts: a command's own stands."""
MAX_ROUNDS = 4


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
    had = {(f.rule, f.key) for f in check(_without_drafts(before)) if f.rule not in WITH_DRAFTS}
    selected = _selected(before.document, sizes, schema.runtime, draft, file, gpus)
    kind = sizes.spec.kind
    changes = {key: Change(key, value, _replaced(before, key, value, kind)) for key, value in selected.items()}
    for _ in range(MAX_ROUNDS):
        new = edited(text, file, server, schema, {key: change.value for key, change in changes.items()})
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


def _without_drafts(config: CheckedConfig) -> CheckedConfig:
    """The command as it would decode without drafts."""
    document = {key: value for key, value in config.document.items() if not _is_speculation(key)}
    served = msgspec.structs.replace(config.served, draft_sizes=None, checkpoint=None, algorithms={})
    return msgspec.structs.replace(config, document=document, served=served)


def _is_speculation(key: object) -> bool:
    """Whether an argument is about drafts; keys of YAML need not be text."""
    return isinstance(key, str) and SPECULATION.fullmatch(key) is not None


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

    If a command already drafts with this method, its other settings of drafts stay, including K if the block is long
    enough.
    """
    gpu, is_trtllm = None if gpus is None else gpus.gpu, runtime == "trtllm"
    name = (converted_draft(sizes) or place(draft)) if is_trtllm else draft
    most = sizes.spec.num_draft_tokens
    attention = native_attention(sizes, gpu) if is_trtllm and gpu is not None else None
    new = draft_arguments(sizes, runtime, name, most, str(file), gpu=gpu, attention=attention)
    old = {key: value for key, value in document.items() if _is_speculation(key)}
    keys = runtime_keys()[runtime]
    if str(_at(old, keys.method)).lower() == str(_at(new, keys.method)).lower():
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


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, (dict, list, bool)) else str(value)
