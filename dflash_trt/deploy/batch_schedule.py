# SPDX-License-Identifier: Apache-2.0
"""Draft lengths by batch: read from a deployment file, written for TensorRT-LLM and vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.errors import ConfigError

Schedule = tuple[tuple[int, int], ...]
"""Smallest batch and drafts from there on, smallest batch first; 0 drafts is plain decoding."""


def read_schedule(lengths: Mapping[int, int], num_draft_tokens: int, where: str) -> Schedule:
    """Read a deployment file's schedule; ConfigError, naming `where`, for an invalid one."""
    schedule = tuple(sorted(lengths.items()))
    if not schedule or schedule[0] != (1, num_draft_tokens):
        found = f"{{{schedule[0][0]}: {schedule[0][1]}, ...}}" if schedule else "{}"
        raise ConfigError(
            f"{where}: expected to begin with batch 1 and num_draft_tokens {num_draft_tokens}, found {found}",
            hint="set num_draft_tokens to the length at batch 1",
        )
    if above := [(batch, length) for batch, length in schedule if length > num_draft_tokens]:
        raise ConfigError(
            f"{where}: expected at most num_draft_tokens {num_draft_tokens}, found {above[0][1]} from batch"
            f" {above[0][0]} on"
        )
    return schedule


def trtllm_schedule(schedule: Schedule, max_batch_size: int) -> dict[int, int]:
    """TensorRT-LLM's draft_len_schedule: largest batch of each length.

    Raises ConfigError for plain decoding: its worker stores no context in a step without drafts.
    """
    if plain := [batch for batch, length in schedule if not length and batch <= max_batch_size]:
        raise ConfigError(
            "draft_schedule: expected 1 or more drafts for every batch with TensorRT-LLM, found 0 from batch"
            f" {plain[0]} on",
            hint=f"set max_batch_size to {plain[0] - 1}, or write 1: a step without drafts stores no context",
        )
    return {end: length for _, end, length in _ranges(schedule, max_batch_size)}


def vllm_schedule(schedule: Schedule, max_batch_size: int) -> list[list[int]]:
    """vLLM's num_speculative_tokens_per_batch_size: [smallest batch, largest batch, length]."""
    return [list(entry) for entry in _ranges(schedule, max_batch_size)]


def _ranges(schedule: Schedule, max_batch_size: int) -> list[tuple[int, int, int]]:
    begins = [begin for begin, _ in schedule if begin <= max_batch_size]
    ends = [*(begin - 1 for begin in begins[1:]), max_batch_size]
    return [(begin, end, length) for (begin, length), end in zip(schedule, ends, strict=False)]
