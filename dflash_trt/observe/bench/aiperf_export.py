# SPDX-License-Identifier: Apache-2.0
"""What AIPerf exports: profile_export_aiperf.json, a summary, and profile_export.jsonl, a record of each request.

Names and units as AIPerf 0.13.0 writes them (schema 1.4): times in ms, moments in ns. It keeps no finish_reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from dflash_trt.errors import EndpointError, cut
from dflash_trt.files.json_file import read_json
from dflash_trt.files.json_lines import read_json_lines
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from dflash_trt.runtime.acceptance import Acceptance

SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"
WHAT = "an export of AIPerf 0.13"


class _Metric(msgspec.Struct, frozen=True):
    value: float | list[float]
    unit: str


class _Metadata(msgspec.Struct, frozen=True):
    conversation_id: str
    turn_index: int
    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str
    was_cancelled: bool = False


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str | None = None
    code: int | None = None


class _Speculation(msgspec.Struct, frozen=True):
    num_accepted_draft_tokens: Annotated[int, msgspec.Meta(ge=0)]
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0)]
    num_spec_steps: Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, frozen=True):
    metadata: _Metadata
    metrics: dict[str, _Metric]
    error: _Error | None = None
    spec_decode_acceptance: _Speculation | None = None


class _Summary(msgspec.Struct, frozen=True):
    aiperf_version: str
    was_cancelled: bool
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request: its figures, or why it has none."""

    conversation: str
    turn: int
    began_ns: int
    ended_ns: int
    error: str | None = None
    is_timeout: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_seconds: float | None = None
    seconds: float = 0.0
    acceptance: Acceptance | None = None
    """Where the server tells it with each answer."""


@dataclass(frozen=True, slots=True)
class Export:
    """Of one run."""

    version: str
    records: tuple[RequestRecord, ...]

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return (max(r.ended_ns for r in self.records) - min(r.began_ns for r in self.records)) / 1e9


def read_export(folder: Path) -> Export:
    """Both files; raises EndpointError for what AIPerf 0.13 would not write, or where it was cut short."""
    summary = read_json(folder / SUMMARY, _Summary, EndpointError, what=WHAT)
    if summary.was_cancelled or not summary.is_complete:
        raise EndpointError(f"{folder / SUMMARY}: expected a complete run, found one that was cut short")
    records = tuple(_records(folder))
    if not records:
        raise EndpointError(f"{folder / RECORDS}: expected a record of each request, found none")
    return Export(summary.aiperf_version, records)


def first_error(folder: Path) -> str | None:
    """Of a run that went wrong: what its first failed request got, where AIPerf has written that."""
    with suppress(EndpointError):
        return next((record.error for record in _records(folder) if record.error is not None), None)
    return None


def _records(folder: Path) -> Iterator[RequestRecord]:
    for where, record in read_json_lines(folder / RECORDS, _Record, EndpointError, what=WHAT):
        if record.metadata.benchmark_phase == "profiling":
            yield _read(where, record)


def _read(where: str, record: _Record) -> RequestRecord:
    metadata = record.metadata
    base = RequestRecord(
        conversation=metadata.conversation_id,
        turn=metadata.turn_index,
        began_ns=metadata.request_start_ns,
        ended_ns=metadata.request_end_ns,
    )
    if record.error is not None or metadata.was_cancelled:
        error = record.error or _Error(message="cancelled")
        is_timeout = error.type == "TimeoutError"
        said = "timed out" if is_timeout else cut(f"{error.code or error.type or 'error'}: {error.message}")
        return replace(base, error=said, is_timeout=is_timeout)
    ttft = record.metrics.get("time_to_first_token")
    speculation = record.spec_decode_acceptance
    return replace(
        base,
        input_tokens=int(_value(where, record, "usage_prompt_tokens", "tokens")),
        output_tokens=int(_value(where, record, "usage_completion_tokens", "tokens")),
        ttft_seconds=None if ttft is None else _value(where, record, "time_to_first_token", "ms") / 1e3,
        seconds=_value(where, record, "request_latency", "ms") / 1e3,
        acceptance=None
        if speculation is None
        else drafting(speculation.num_spec_steps, speculation.num_accepted_draft_tokens, speculation.num_draft_tokens),
    )


def _value(where: str, record: _Record, name: str, unit: str) -> float:
    metric = record.metrics.get(name)
    if metric is None and name.startswith("usage"):
        raise EndpointError(
            f"{where}: expected the server's own count of tokens, found none",
            hint="the server must answer stream_options.include_usage",
        )
    if metric is None or metric.unit != unit or isinstance(metric.value, list):
        raise EndpointError(f"{where}: expected {name} in {unit}, found {metric}")
    return metric.value
