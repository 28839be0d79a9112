# SPDX-License-Identifier: Apache-2.0
"""Rules about models: context length, families without a drafter, repositories with Python, layouts of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import msgspec

from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.dialects.speculators import SPECULATORS
from dflash_trt.checkpoint.exclude_list import exclude_list_problem
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, Rule, error, served_target, unchecked, warning
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.errors import CheckpointError
from dflash_trt.files.command import command_line
from dflash_trt.files.json_file import package_data

KEY = "trust_remote_code"


class RemoteCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets that no runtime loads without running their Python."""

    targets: tuple[str, ...]
    source: str


class FamilySupport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A family whose hidden states may never be captured, or that has no speculative worker."""

    family: str
    severity: Literal["error", "warning"]
    prefixes: tuple[str, ...]
    """Prefixes of repository ids."""
    model_types: tuple[str, ...]
    """In config.json of a directory."""
    found: str
    source: str


class TargetSupport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """target_support.json."""

    remote_code: RemoteCode
    trtllm: tuple[FamilySupport, ...]


@cache
def target_support() -> TargetSupport:
    """The package's data."""
    return package_data(DATA / "target_support.json", TargetSupport)


def pair(config: CheckedConfig) -> Iterator[Finding]:
    """A draft that was made for another target."""
    draft, target = config.served.draft_sizes, config.served.target_sizes
    if draft is None or target is None:
        return
    try:
        check_pair(draft.spec, target.spec, draft_name=draft.name, target_name=target.name)
    except CheckpointError as refused:
        key = config.keys.draft
        yield Finding("pair", ERROR, key, refused.message, "name the draft that was trained for this target")


def other_models(config: CheckedConfig) -> Iterator[Finding]:
    """Models of the file that are not those it is checked for: repositories by name, whatever copies are called."""
    key = config.keys.draft
    draft = config.setting(key) if config.method in BLOCKS else None
    known = {
        "the target": config.served.target,
        "the draft": config.served.draft_sizes.name if config.served.draft_sizes else None,
    }
    found = {"the target": served_target(config.document), "the draft": draft}
    for what, expected in known.items():
        if expected is not None and _are_others(expected, found[what]):
            yield error(
                "other-models", key if what == "the draft" else "model",
                f"{expected}, {what} that it is checked for", found[what],
                "check it without SOURCE, or with that of these models",
            )  # fmt: skip


def _are_others(expected: str, found: object) -> bool:
    if not isinstance(found, str) or not all(map(REPOSITORY_ID.fullmatch, (expected, found))):
        return False
    names = sorted((name.rpartition("/")[2].lower() for name in (expected, found)), key=len)
    return names[0] not in names[1]  # a quantised copy's name contains the model's


def longest_context(config: CheckedConfig) -> int | None:
    """Tokens that draft and target both have positions for, as far as they are known."""
    positions = [
        sizes.spec.max_position_embeddings for sizes in (config.served.draft_sizes, config.served.target_sizes) if sizes
    ]
    return min(filter(None, positions), default=None)


def context_length(config: CheckedConfig) -> Iterator[Finding]:
    """No more tokens than draft and target have positions for; one whose RoPE is stretched later may take more."""
    key = config.keys.max_seq_len
    longest, length = longest_context(config), config.number(key)
    draft = config.served.draft_sizes
    if length and config.method in BLOCKS and (draft is None or draft.spec.max_position_embeddings is None):
        name = "the draft" if draft is None else draft.name
        yield unchecked(
            "context-length", key, f"max_position_embeddings of {name} is not known, and {length} may exceed it",
            "give --draft DIR",
        )  # fmt: skip
    if longest and length and length > longest:
        yield warning(
            "context-length", key, f"at most {longest}, the smaller max_position_embeddings of draft and target",
            length, f"set it to {longest}",
        )  # fmt: skip


def remote_code(config: CheckedConfig) -> Iterator[Finding]:
    """Python of the target's repository is run only if the configuration allows it."""
    remote = target_support().remote_code
    if config.setting(KEY) is True:
        yield unchecked("remote-code", KEY, "Python of the target's repository is run", "read it, and pin its revision")
    elif config.served.target in remote.targets:
        yield error(
            "remote-code", KEY, f"true for {config.served.target} ({remote.source})", "false",
            f"set {KEY}: true in the deployment once you trust that repository",
        )  # fmt: skip


def target_family(config: CheckedConfig) -> Iterator[Finding]:
    """Families for which TensorRT-LLM captures no hidden states, according to its own documents."""
    name = config.served.target or ""
    model_type = None if config.served.target_sizes is None else config.served.target_sizes.spec.model_type
    for entry in target_support().trtllm:
        if name.startswith(entry.prefixes) or model_type in entry.model_types:
            yield (error if entry.severity == "error" else warning)(
                "target-family", "model", "a target whose layers are captured for DFlash: where they are not, taps are"
                " empty and nothing is accepted (tau 1)", f"{entry.family}: {entry.found} ({entry.source})",
                "serve it with vLLM or SGLang" if entry.severity == "error" else "look at tau of the first run",
            )  # fmt: skip


def exclude_list(config: CheckedConfig) -> Iterator[Finding]:
    """A list of dense modules that contradicts the draft's tensors; native mode reads the checkpoint as it is."""
    draft = config.served.draft_sizes
    if draft is None or draft.checkpoint is None or config.served.mode == "engine":
        return
    if config.served.algorithms != draft.quantized or (problem := exclude_list_problem(draft.checkpoint)) is None:
        return
    copy = f"{draft.name.rstrip('/')}-{READ}"
    fix = command_line(["dflash-trt", "convert", draft.name, "-o", copy, "--to", READ])
    yield Finding(
        "exclude-list", ERROR, config.keys.draft, f"{draft.name}: {problem}",
        f"{fix}, which writes the list from the tensors, and serve {copy}",
    )  # fmt: skip


READ = "zlab"
"""Layout that SGLang (models/dflash.py) and TensorRT-LLM (speculative/dflash.py) read, its facts in dflash_config."""


def draft_layout(config: CheckedConfig) -> Iterator[Finding]:
    """Speculators' layout, which vLLM alone reads; the fix is `convert`, where it can."""
    draft, runtime = config.served.draft_sizes, config.runtime
    if runtime == "vllm" or draft is None or draft.checkpoint is None:
        return
    checkpoint = draft.checkpoint
    if checkpoint.dialect is not SPECULATORS or config.served.mode == "engine":
        return
    copy = f"{draft.name.rstrip('/')}-{READ}"
    fix = f"{command_line(['dflash-trt', 'convert', draft.name, '-o', copy, '--to', READ])}, and serve {copy}"
    try:
        LAYOUTS[READ].to_config(checkpoint.spec, checkpoint.torch_dtype())
    except CheckpointError as refused:
        fix = f"serve it with vLLM: convert --to {READ} refuses it ({refused.message})"
    yield error(
        "draft-layout", config.keys.draft,
        f"the layout {READ} (config.json with dflash_config), which {PACKAGES[runtime]} reads", "speculators", fix,
    )  # fmt: skip


def mtp_layers(config: CheckedConfig) -> Iterator[Finding]:
    """MTP layers of the target, where no draft of its own is given, and the draft lengths that they are reused for."""
    runtime, target = config.runtime, config.served.target_sizes
    keys, key = config.keys, config.keys.method
    if config.method != "mtp" or config.setting(keys.draft) is not None:
        return
    layers, K = None if target is None else target.num_mtp_layers, config.number(keys.num_draft_tokens)
    if target is None or layers is None:
        yield unchecked("mtp-layers", key, "whether the target has MTP layers is not known", "give --target DIR")
    elif not layers:
        yield error("mtp-layers", key, "a target with MTP layers", f"none in {target.name}", "choose another method")
    elif runtime == "vllm" and K is not None and layers < K and K % layers:
        fix = f"set it to {K - K % layers}"  # SpeculativeConfig.__post_init__ of vLLM 0.33.0
        yield error("mtp-layers", keys.num_draft_tokens, f"a multiple of the target's {layers} MTP layers", K, fix)
    if runtime == "trtllm" and layers != 0:
        yield unchecked(
            "mtp-layers", key, "TensorRT-LLM's support matrix has MTP for DeepSeek V3 to V4, GLM-4.5 to 4.7,"
            " Qwen3.5-MoE, Nemotron-H and Step-3.7 (docs models/supported-models.md @ 00b6d5a2)",
            "look at the acceptance length of the first run",
        )  # fmt: skip


MODEL_RULES: tuple[Rule, ...] = (other_models, pair, draft_layout, exclude_list, context_length, mtp_layers)
"""Rules about draft and target that every runtime's configuration is checked by."""
