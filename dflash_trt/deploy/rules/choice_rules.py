# SPDX-License-Identifier: Apache-2.0
"""Rules for all runtimes: choices that the writer makes, and methods and releases without rules of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dflash_trt.checkpoint.source import GGUF
from dflash_trt.deploy.catalog import needs_thinking_off
from dflash_trt.deploy.choices import CHOICES, Choice, Circumstances, graph_tokens
from dflash_trt.deploy.command_text import flag_words
from dflash_trt.deploy.finding import WARNING, Finding
from dflash_trt.deploy.hybrid_caches import vllm_cache_layout
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.rules.checked_config import CheckedConfig, check_num_draft_tokens, error, unchecked, warning
from dflash_trt.deploy.schema import Runtime, versions
from dflash_trt.deploy.server_arguments import THINKING_OFF
from dflash_trt.files.command import command_line, quoted


def unchecked_method(config: CheckedConfig) -> Iterator[Finding]:
    """A method other than DFlash is compared with the schema only; of DSpark, K is checked, too."""
    name = config.method
    if name is None or name == "dflash":
        return
    yield unchecked(
        "method", config.keys.method, f"the method {name}: its keys were compared with the schema, and no more",
        "look up what it needs of model, draft and memory",
    )  # fmt: skip
    if name == "dspark":
        yield from check_num_draft_tokens(config, config.number(config.keys.num_draft_tokens))


def packed_weights(config: CheckedConfig) -> Iterator[Finding]:
    """A draft whose weights another quantiser packed, served as it is."""
    draft, key = config.served.draft_sizes, config.keys.draft
    if draft is None or draft.checkpoint is None or config.setting(key) != draft.name:
        return
    packed, is_gguf = draft.checkpoint.stored_as, draft.name.endswith(GGUF)
    if packed is None or (config.runtime == "vllm" and not is_gguf):
        return
    written = quoted(Path(f"{Path(draft.name).stem}-bf16"))
    fix = f"dflash-trt convert {quoted(Path(draft.name))} -o {written} --to zlab, and serve that"
    if is_gguf:
        yield error("packed-weights", key, "a directory of safetensors", packed, fix)
    else:
        yield unchecked("packed-weights", key, f"whether a draft in {packed} loads was not looked up", fix)


def release(config: CheckedConfig) -> Iterator[Finding]:
    """A release without a schema of its own, whose keys may differ."""
    schema = config.schema
    if schema.stands_for:
        yield warning(
            "release", "--version", f"a release whose keys were read ({', '.join(versions(schema.runtime))})",
            f"{schema.release}, compared with {schema.version}: keys, defaults and limits that came, went or changed"
            " between the two are not seen",
            "compare the keys with that release's own documents",
        )  # fmt: skip


def choices(config: CheckedConfig) -> Iterator[Finding]:
    """Settings of which the writer of configurations takes another."""
    circumstances = _circumstances(config)
    for choice in CHOICES[config.runtime]:
        wanted = choice.wanted(circumstances)
        if wanted is not None:
            yield from _compared(config, choice, wanted)


def _compared(config: CheckedConfig, choice: Choice, wanted: object) -> Iterator[Finding]:
    found = config.environment.get(choice.key) if choice.is_environment else config.setting(choice.key)
    if choice.is_least:
        is_fine = (
            not config.is_set(choice.key)
            or not isinstance(found, int)
            or not isinstance(wanted, int)
            or found >= wanted
        )
    else:
        is_fine = found == wanted or (found is None and not choice.unset)
    if is_fine:
        return
    is_set = choice.key in config.environment if choice.is_environment else config.is_set(choice.key)
    shown = _text(found) if is_set else choice.unset or f"{_text(found)} (its default)"
    expected = f"{'at least ' if choice.is_least else ''}{_text(wanted)}"
    yield Finding(
        choice.rule, WARNING, choice.key, f"expected {expected}, found {shown}: {choice.why}",
        f"export {choice.key}={wanted}" if choice.is_environment else _fix(config.runtime, choice.key, wanted),
        {choice.key: wanted},
    )  # fmt: skip


def _fix(runtime: Runtime, key: str, wanted: object) -> str:
    flags = [] if runtime == "trtllm" else flag_words(runtime, {key: wanted})
    return f"write {command_line(flags)}" if flags else f"set it to {_text(wanted)}"


def _circumstances(config: CheckedConfig) -> Circumstances:
    keys = config.keys
    batch, drafts = config.number(keys.max_batch_size), config.number(keys.num_draft_tokens)
    window = None if drafts is None else drafts + (not keys.counts_window)
    return Circumstances(
        method=config.method, reuses_prefixes=config.served.asked_prefix_reuse,
        cache_layout=vllm_cache_layout(config.served.checkpoint, config.number(keys.ranks) or 1), max_batch_size=batch,
        decode_tokens=batch * window if batch and window else None, graph_tokens=graph_tokens(config.served.gpus),
    )  # fmt: skip


def parsers(config: CheckedConfig) -> Iterator[Finding]:
    """Parsers without which answers of the target are raw text: thoughts and tool calls among them."""
    runtime, known = config.runtime, target_parsers(config.served.target or "")
    names = {"reasoning_parser": known.reasoning.get(runtime), "tool_call_parser": known.tool.get(runtime)}
    if config.dynamo is not None:  # The frontend parses tool calls
        del names["tool_call_parser"]
        yield from _dynamo_flag(config, "parsers", "dyn_reasoning_parser", known.reasoning.get("dynamo"))
        yield from _dynamo_flag(config, "parsers", "dyn_tool_call_parser", known.tool.get("dynamo"))
        yield from _two_tool_parsers(config)
    for key, name in names.items():
        found = config.document.get(key)
        if name is None or found == name or key not in config.schema.properties():
            continue
        yield warning("parsers", key, f"{name} for {config.served.target}", found or "none", _fix(runtime, key, name))


def _two_tool_parsers(config: CheckedConfig) -> Iterator[Finding]:
    """SGLang's parser of tool calls beside Dynamo's, with which dynamo.sglang 1.6.1 exits (its args.py)."""
    key = "tool_call_parser"
    found, dynamo = config.document.get(key), _dynamo_value(config, f"dyn_{key}")
    if config.runtime == "sglang" and found and dynamo:
        yield error(
            "parsers", key, f"none beside --dyn-tool-call-parser {dynamo}: the worker refuses to start with both",
            found, "remove it",
        )  # fmt: skip


def chat_mode(config: CheckedConfig) -> Iterator[Finding]:
    """The server's default for thinking, where the draft was trained without it."""
    key, runtime, draft = "default_chat_template_kwargs", config.runtime, config.served.checkpoint
    if not needs_thinking_off(draft):
        return
    why = f"{draft} was trained on answers without thinking"
    if config.dynamo is not None:
        yield from _dynamo_flag(config, "chat-mode", "dyn_default_thinking_mode", "disabled", f": {why}")
        return
    if key not in config.schema.properties():
        return
    found = config.document.get(key)
    if '"enable_thinking":false' not in "".join((found if isinstance(found, str) else json.dumps(found)).split()):
        expected = f"{json.dumps(THINKING_OFF)}: {why}"
        yield warning("chat-mode", key, expected, found or "none", _fix(runtime, key, THINKING_OFF))


def _dynamo_flag(config: CheckedConfig, rule: str, key: str, wanted: str | None, why: str = "") -> Iterator[Finding]:
    """A flag of Dynamo's own, or its variable, with another value than `wanted`."""
    found = _dynamo_value(config, key)
    if wanted is not None and found != wanted:
        expected = f"{wanted}{why or f' for {config.served.target}'}"
        yield warning(rule, key, expected, found or "none", f"write --{key.replace('_', '-')} {wanted}")


def _dynamo_value(config: CheckedConfig, key: str) -> str | None:
    """Value of a flag of Dynamo's own, or of its variable."""
    return (config.dynamo or {}).get(key) or config.environment.get(key.upper())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
