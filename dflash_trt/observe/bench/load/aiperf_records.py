# SPDX-License-Identifier: Apache-2.0
"""Requests in AIPerf 0.13.0's profile_export.jsonl (schema 1.4).

It keeps no finish_reason: an answer of max_tokens tokens counts as cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.api.acceptance import Count
from dflash_trt.errors import EndpointError, cut
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.observe.bench.point_record import RequestRow
from dflash_trt.observe.endpoints.observed_acceptance import drafting

RECORDS = "profile_export.jsonl"
WHAT = "an export of AIPerf 0.13"


class _Milliseconds(msgspec.Struct, frozen=True):
    value: float
    unit: Literal["ms"]


class _Tokens(msgspec.Struct, frozen=True):
    value: float
    unit: Literal["tokens"]


class _Metrics(msgspec.Struct, frozen=True):
    """Metrics that are read; a request that failed has none."""

    request_latency: _Milliseconds | None = None
    time_to_first_token: _Milliseconds | None = None
    usage_prompt_tokens: _Tokens | None = None
    usage_completion_tokens: _Tokens | None = None


class _Metadata(msgspec.Struct, frozen=True):
    conversation_id: str
    benchmark_phase: str
    was_cancelled: bool = False


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str | None = None
    code: int | None = None


class _Speculation(msgspec.Struct, frozen=True):
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    num_spec_steps: Count


class _Record(msgspec.Struct, frozen=True):
    metadata: _Metadata
    metrics: _Metrics
    error: _Error | None = None
    spec_decode_acceptance: _Speculation | None = None


def read_records(folder: Path, categories: Mapping[str, str | None], max_tokens: int) -> Iterator[RequestRow | str]:
    """Each request, or the error of one that failed; `categories` are the conversations'."""
    for where, record in read_json_lines(folder / RECORDS, _Record, EndpointError, what=WHAT):
        if record.metadata.benchmark_phase == "profiling":
            category = categories.get(record.metadata.conversation_id)
            yield _failure(record) or _row(where, record, category, max_tokens)


def first_error(folder: Path) -> str | None:
    """Error of the first failed request, if AIPerf has recorded one."""
    with suppress(EndpointError):
        return next((found for found in read_records(folder, {}, 0) if isinstance(found, str)), None)
    return None


def _failure(record: _Record) -> str | None:
    if record.error is None:
        return "cancelled" if record.metadata.was_cancelled else None
    if record.error.type == "TimeoutError":
        return "timed out"
    return cut(f"{record.error.code or record.error.type or 'error'}: {record.error.message}")


def _row(where: str, record: _Record, category: str | None, max_tokens: int) -> RequestRow:
    metrics, drafts = record.metrics, record.spec_decode_acceptance
    inputs, outputs, first = metrics.usage_prompt_tokens, metrics.usage_completion_tokens, metrics.time_to_first_token
    if inputs is None or outputs is None:
        raise EndpointError(
            f"{where}: the server did not count tokens", hint="the server must answer stream_options.include_usage"
        )
    if metrics.request_latency is None:
        raise EndpointError(f"{where}: request_latency is missing")
    acceptance = None
    if drafts is not None:
        acceptance = drafting(drafts.num_spec_steps, drafts.num_accepted_draft_tokens, drafts.num_draft_tokens)
    return RequestRow(
        input_tokens=int(inputs.value),
        output_tokens=int(outputs.value),
        ttft_seconds=None if first is None else first.value / 1e3,
        seconds=metrics.request_latency.value / 1e3,
        is_cut=outputs.value >= max_tokens,
        category=category,
        acceptance=acceptance,
    )
