# SPDX-License-Identifier: Apache-2.0
"""Rules for SGLang's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.attention_rules import sglang_attention
from dflash_trt.deploy.rules.checked_config import (
    CheckedConfig,
    Rule,
    check_num_draft_tokens,
    check_ranks,
    check_required,
    error,
    unchecked,
    warning,
)
from dflash_trt.deploy.rules.memory_rules import check_memory, pool_share

WINDOW = "speculative_num_draft_tokens"
BLOCK = "speculative_dflash_block_size"
TOPK = "speculative_eagle_topk"
DRAFT_WINDOW = "speculative_draft_window_size"
BREADTH = "speculative_ngram_max_bfs_breadth"


def _verify_window(config: CheckedConfig) -> int | None:
    return config.number(WINDOW) or config.number(BLOCK)


def verify_window(config: CheckedConfig) -> Iterator[Finding]:
    """Two names of one number, and the block it must fit."""
    window, block = config.number(WINDOW), config.number(BLOCK)
    if window is not None and block is not None and window != block:
        yield error("verify-window", BLOCK, f"{window}, as {WINDOW}", block, f"set it to {window}")
    yield from check_num_draft_tokens(config, _verify_window(config))
    trained = config.served.draft_sizes.spec.block_size if config.served.draft_sizes else 0
    if window is not None and block is None and window < trained:
        yield unchecked(
            "verify-window", BLOCK, f"releases after 0.5.23 also cut the draft's own block to {window} of {trained}",
            f"with such a release add --{BLOCK.replace('_', '-')} {trained}",
        )  # fmt: skip


def pipeline(config: CheckedConfig) -> Iterator[Finding]:
    """DFlash runs without pipeline parallelism."""
    stages = config.number("pp_size") or 1
    if stages != 1:
        yield error("parallelism", "pp_size", "1 with DFLASH", stages, "set it to 1")


def dp_attention(config: CheckedConfig) -> Iterator[Finding]:
    """Greedy projection borrows the target's head, which every attention rank must hold."""
    is_old = config.document.get("enable_dp_attention") is True  # attn_dp_size by its earlier flag
    if (config.number("dp_size" if is_old else "attn_dp_size") or 1) == 1:
        return
    if config.setting("enable_dp_lm_head") is not True:
        fix = "write --enable-dp-lm-head"
        yield error(
            "dp-attention", "enable_dp_lm_head", "true with attn_dp_size > 1", "false", fix, enable_dp_lm_head=True
        )  # fmt: skip
    if (found := config.number("attn_cp_size") or 1) != 1:
        yield error("dp-attention", "attn_cp_size", "1 with attn_dp_size > 1", found, "set it to 1")


def draft_window(config: CheckedConfig) -> Iterator[Finding]:
    """A bounded context must hold at least one block."""
    window, verify = config.number(DRAFT_WINDOW), _verify_window(config)
    if window is not None and verify is not None and window < verify:
        yield error("draft-window", DRAFT_WINDOW, f"at least the verify window {verify}", window, f"set it to {verify}")
    if config.number("speculative_draft_sink_size") is not None and window is None:
        yield error(
            "draft-window", "speculative_draft_sink_size", f"{DRAFT_WINDOW} besides", "no such argument",
            f"leave it out, or add {DRAFT_WINDOW}",
        )  # fmt: skip


def running_requests(config: CheckedConfig) -> Iterator[Finding]:
    """SGLang cuts an unset limit down, which makes a comparison with another method unfair."""
    rule = config.schema.rules["max_running_requests"]
    if config.number("max_running_requests") is None:
        default = rule["default_with_dflash"]
        yield warning(
            "running-requests", "max_running_requests", "a number", f"none: SGLang takes {default} with DFLASH",
            "set it to the requests that shall run at once", max_running_requests=default,
        )  # fmt: skip


def eagle_arguments(config: CheckedConfig) -> Iterator[Finding]:
    """Arguments of EAGLE: DFlash sets them to 1, but the attention backend is chosen by what was given.

    get_default_attn_backend in arg_groups/model_override_base.py runs before _handle_dflash in speculative_hook.py.
    """
    topk, page = config.number(TOPK), config.number("page_size")
    is_chosen = config.setting("attention_backend") is not None
    if topk is not None and (topk != 1 or page not in (None, 1)) and not is_chosen:
        yield warning(
            "eagle-arguments", TOPK, "no such argument with DFLASH", f"{topk}: SGLang sets it to 1 after it has chosen"
            " flashinfer or triton because of it, in place of trtllm_mha (SM 10.x) and fa3 (9.0)", "remove it",
        )  # fmt: skip
    for key in (TOPK, "speculative_num_steps"):
        found = config.number(key)
        if found not in (None, 1) and (key != TOPK or is_chosen):
            yield warning("eagle-arguments", key, "1 with DFLASH", f"{found}, which SGLang sets to 1", "remove it")


def disaggregated(config: CheckedConfig) -> Iterator[Finding]:
    """Prefill and decode in different servers, which carry DFlash's context since 0.5.23."""
    mode = config.setting("disaggregation_mode")
    if mode in (None, "null"):
        return
    yield unchecked(
        "disaggregated", "disaggregation_mode", "prefill and decode in different servers: 0.5.23 is the first release"
        " that carries the draft's context (dflash_disaggregation.py)", "measure its acceptance length",
    )  # fmt: skip
    key = "disaggregation_decode_enable_radix_cache"
    if mode == "decode" and config.setting(key) is True:
        yield error("disaggregated", key, "false with DFLASH", "true", "remove it")


def ngram_tree(config: CheckedConfig) -> Iterator[Finding]:
    """N-grams as a tree, SGLang's default, which most attention backends refuse with pages of several tokens."""
    breadth = config.number(BREADTH) or 1
    if config.method != "ngram":
        return
    if (config.number("dp_size" if config.document.get("enable_dp_attention") is True else "attn_dp_size") or 1) > 1:
        yield error("dp-attention", "attn_dp_size", "1 with NGRAM", "more", "remove it")
    if breadth == 1 or config.setting("attention_backend") == "flashinfer" or config.setting("page_size") == 1:
        return
    fix = "write --speculative-ngram-max-bfs-breadth 1"
    if (page := config.number("page_size") or 1) > 1:
        yield error("ngram-tree", BREADTH, f"1 with pages of {page} tokens, flashinfer aside", breadth, fix)
    else:
        yield unchecked(
            "ngram-tree", BREADTH, f"a tree of breadth {breadth}, which SGLang refuses where it chooses pages of"
            " several tokens and not flashinfer (arg_groups/speculative_hook.py, _handle_ngram)", fix,
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    lambda config: check_required(config, (config.method or "").upper()),
    lambda config: check_ranks(config, "tp_size", "pp_size", "dp_size"),
    draft_window,
    ngram_tree,
    sglang_attention,
    pool_share,
)
DFLASH_RULES: tuple[Rule, ...] = (
    verify_window, pipeline, dp_attention, running_requests, eagle_arguments, disaggregated, check_memory,
)  # fmt: skip
"""Rules for configurations that decode with DFlash."""
