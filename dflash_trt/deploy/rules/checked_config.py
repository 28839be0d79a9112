# SPDX-License-Identifier: Apache-2.0
"""The input of rules: a runtime's arguments, and the known facts of models and GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.resolved_deployment import ServedModels
from dflash_trt.deploy.schema import Runtime, RuntimeKeys, Schema
from dflash_trt.deploy.vllm_speculation import SECTION, inferred_method

MTP_NAMES = ("nextn", "_mtp")
"""Ends of other names of the method mtp: SGLang's, and vLLM's earlier ones for single families."""
NGRAM_ON_GPU = "ngram_gpu"
"""vLLM's other name of the method ngram."""
BLOCKS = ("dflash", "dspark")
"""Methods whose draft is one of ours to read."""


class CheckedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of a runtime, with what is known of the models and GPUs."""

    schema: Schema
    document: dict[str, Any]
    served: ServedModels = ServedModels()
    environment: dict[str, str] = {}
    """Variables that the command sets."""
    reading: list[Finding] = []
    """Findings from reading the arguments."""
    is_whole: bool = True
    """Whether every file of arguments was opened."""
    dynamo: dict[str, str] | None = None
    """Values of Dynamo's own flags, by name; None where Dynamo does not start the server."""

    @property
    def runtime(self) -> Runtime:
        return self.schema.runtime

    @property
    def keys(self) -> RuntimeKeys:
        """Names of common settings in this runtime."""
        return self.schema.keys

    @property
    def method(self) -> str | None:
        """Method of drafting in small letters, as vLLM infers one that is left out; None for plain decoding."""
        found, section = self.setting(self.keys.method), self.document.get(SECTION)
        if found is None and self.runtime == "vllm" and isinstance(section, dict) and section:
            draft = self.served.draft_sizes
            return inferred_method(section, draft.architectures if draft else ())
        name = str(found).lower() if found else ""
        if name.endswith(MTP_NAMES):
            return "mtp"
        return "ngram" if name == NGRAM_ON_GPU else name or None

    def setting(self, path: str) -> Any:
        """The value at a dotted path, or the release's default."""
        return self.schema.setting(self.document, path)

    def number(self, path: str) -> int | None:
        """The integer > 0 at a dotted path; None where it is unset or something else, which the schema reports."""
        value = self.setting(path)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def is_set(self, path: str) -> bool:
        """Whether the configuration itself sets it."""
        value: Any = self.document
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return False
            value = value[key]
        return True


MODEL_KEYS = ("model_tag", "model_path", "model")


def served_target(document: dict[str, Any]) -> str | None:
    """Directory or repository id that the arguments name; TensorRT-LLM's file has none."""
    return next((str(document[key]) for key in MODEL_KEYS if isinstance(document.get(key), str)), None)


Rule = Callable[[CheckedConfig], Iterator[Finding]]


def error(rule: str, key: str, expected: str, found: object, fix: str, **settings: Any) -> Finding:
    """A setting that the runtime refuses, or that breaks it; `settings` mend it, by dotted key."""
    return Finding(rule, ERROR, key, f"expected {expected}, found {found}", fix, settings)


def warning(rule: str, key: str, expected: str, found: object, fix: str, **settings: Any) -> Finding:
    """A setting that runs, but badly; `settings` mend it."""
    return Finding(rule, WARNING, key, f"expected {expected}, found {found}", fix, settings)


def unchecked(rule: str, key: str, missing: str, fix: str) -> Finding:
    """A check that could not be made."""
    return Finding(rule, UNCHECKED, key, missing, fix)


def check_required(config: CheckedConfig, method: str, section: str = "") -> Iterator[Finding]:
    """Keys that a drafting method needs."""
    for name in config.schema.rules["required"]["methods"].get(method, []):
        if config.setting(key := f"{section}{name}") is None:
            yield error("missing-key", key, f"a value for {method}", "no such key", f"add {name}")


def check_num_draft_tokens(config: CheckedConfig, found: int | None) -> Iterator[Finding]:
    """K against the block that the draft was trained with, or both with the last verified token."""
    keys, draft = config.keys, config.served.draft_sizes
    key, window = keys.num_draft_tokens, keys.counts_window
    if draft is None:
        yield unchecked("draft-length", key, "the draft's block_size is not known", "give --draft DIR")
        return
    if found is None:
        return
    most = draft.spec.num_draft_tokens + window
    block = f"block_size {draft.spec.block_size} of {draft.name}"
    if found > most:
        first = "" if window else ", whose first slot is the last verified token"
        yield error("draft-length", key, f"at most {most} ({block}{first})", found, f"set it to {most}")
    elif found < most:
        yield warning(
            "draft-length", key, f"{most} ({block})", found, f"set it to {most} unless shorter blocks are wanted"
        )


def check_token_budget(
    config: CheckedConfig, is_speculative: bool, *, refused_below: int | None = None, otherwise: str = ""
) -> Iterator[Finding]:
    """Every running request verifies 1 + K tokens in one forward pass: max_batch_size * (1 + K) <= max_num_tokens.

    A runtime with `refused_below` refuses only smaller budgets; `otherwise` is what it does with the rest.
    """
    keys = config.keys
    batch_key, tokens_key = keys.max_batch_size, keys.max_num_tokens
    num_draft_tokens = config.number(keys.num_draft_tokens) if is_speculative else None
    batch, tokens = config.number(batch_key), config.number(tokens_key)
    if batch is None or tokens is None or num_draft_tokens is None or batch * (1 + num_draft_tokens) <= tokens:
        return
    needed, most = batch * (1 + num_draft_tokens), tokens // (1 + num_draft_tokens)
    if refused_below is not None and tokens <= 1 + num_draft_tokens:
        most = 0  # no batch is small enough
    # A batch that the file leaves to the runtime is cut down by it; one that the file asks for is refused.
    is_refused = config.is_set(batch_key) if refused_below is None else tokens < refused_below
    yield (error if is_refused else warning)(
        "token-budget",
        tokens_key,
        f"at least {batch_key} * (1 + K) = {batch} * {1 + num_draft_tokens} = {needed}",
        f"{tokens}{'' if is_refused or not otherwise else f': {otherwise.format(most)}'}",
        f"raise it to {needed}" + (f" or set {batch_key} to {most}" if most else ""),
        # A batch that the runtime would cut is written as it would be.
        **({tokens_key: needed} if config.is_set(batch_key) or not most else {batch_key: most}),
    )


def check_ranks(config: CheckedConfig, key: str, *others: str) -> Iterator[Finding]:
    """The product of all kinds of parallelism against the number of GPUs."""
    rest = math.prod(config.number(other) or 1 for other in others)
    ranks = (config.number(key) or 1) * rest
    if config.served.gpus is not None and ranks > config.served.gpus.count:
        most = f"at most the {config.served.gpus.count} GPUs of {config.served.gpus}"
        yield error("parallelism", key, most, f"{ranks} ranks", f"set it to {config.served.gpus.count // rest or 1}")


def quantized_context(config: CheckedConfig) -> tuple[list[str], str]:
    """Modules that must not be quantised, and a description of those that are, or ""."""
    names: list[str] = config.schema.rules["quantized_context"]["modules"]
    modules = [module for module in config.served.algorithms if module.rpartition(".")[2] in names]
    return (
        names,
        f"{modules[0]} and {len(modules) - 1} more in {config.served.algorithms[modules[0]]}" if modules else "",
    )
