# SPDX-License-Identifier: Apache-2.0
"""Settings with which a runtime drafts less or not at all where that does not pay: schedules, thresholds, limits."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig, error, unchecked, warning

SPEC = "speculative_config"
SCHEDULE = f"{SPEC}.num_speculative_tokens_per_batch_size"
RULE = "draft-schedule"
WINDOW, THRESHOLD = f"{SPEC}.acceptance_rate_window_size", f"{SPEC}.acceptance_rate_threshold"


def vllm_schedule(config: CheckedConfig) -> Iterator[Finding]:
    """Drafts by ranges of batch sizes, as vLLM 0.33 validates them (v1/spec_decode/dynamic/utils.py)."""
    found, most = config.setting(SCHEDULE), config.number(f"{SPEC}.num_speculative_tokens")
    if found is None:
        return
    expected = "lists of three integers: first batch, last batch, drafts"
    if not isinstance(found, list) or not found or not all(map(_is_entry, found)):
        yield error(RULE, SCHEDULE, expected, found, "write [[1, 8, 7], [9, 64, 3]], for example")
        return
    ranges = sorted(found, key=lambda entry: entry[0])
    ends = [0, *(last for _, last, _ in ranges)]
    if any(first > last or drafts < 0 for first, last, drafts in ranges):
        yield error(RULE, SCHEDULE, "ranges that begin before they end, and 0 drafts or more", found, "correct them")
    elif ranges[0][0] != 1:
        yield error(RULE, SCHEDULE, "a first range from batch 1", found, "begin with 1")
    elif any(first <= end for (first, _, _), end in zip(ranges, ends, strict=False)):
        yield error(RULE, SCHEDULE, "ranges that do not overlap", found, "correct them")
    elif most is not None and (larger := max(drafts for _, _, drafts in ranges)) > most:
        yield warning(
            RULE, SCHEDULE, f"at most num_speculative_tokens {most}", f"{larger}, which vLLM cuts to {most}",
            f"write {most}, or raise num_speculative_tokens",
        )  # fmt: skip


def _is_entry(entry: object) -> bool:
    values = entry if isinstance(entry, list) else []
    return len(values) == 3 and all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def trtllm_switches(config: CheckedConfig) -> Iterator[Finding]:
    """TensorRT-LLM's limits of requests and of acceptance, below or above which it does not draft."""
    limit, batch = config.number(f"{SPEC}.max_concurrency"), config.number("max_batch_size")
    if limit is not None and (batch is None or limit < batch):
        problem = (
            f"what requests accept after a step of more than {limit} requests, and whether it stores their context"
        )
        fix = "write draft_len_schedule with 1 or more, or test it first"
        yield unchecked("max-concurrency", f"{SPEC}.max_concurrency", problem, fix)
    given = [key for key in (WINDOW, THRESHOLD) if config.setting(key) is not None]
    if len(given) == 1:
        missing = (THRESHOLD if given == [WINDOW] else WINDOW).rpartition(".")[2]
        yield warning(
            "acceptance-threshold", given[0], f"{missing}, too: py_executor.py reads both or neither",
            "it alone", f"add {missing}",
        )  # fmt: skip
    elif given and config.setting("enable_attention_dp") is True:
        yield unchecked(
            "acceptance-threshold", WINDOW, "whether ranks with attention data parallelism turn drafting off together",
            "remove both keys, or test it first",
        )  # fmt: skip
