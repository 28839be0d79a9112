# SPDX-License-Identifier: Apache-2.0
"""AIPerf 0.13.0's exports as it wrote them of a run against this server, cut to a few metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
BEGAN = 1_795_322_693_460_483_025


def record(
    conversation: str, number: int, *, tokens: int = 20, error: str | None = None, seconds: float = 0.25
) -> Json:
    """A line of profile_export.jsonl: the request that began `number` tenths of a second after the first."""
    began = BEGAN + number * 100_000_000
    metadata = {
        "session_num": number, "conversation_id": conversation, "turn_index": 0, "credit_issued_ns": began - 1000,
        "request_start_ns": began, "request_end_ns": began + int(seconds * 1e9), "benchmark_phase": "profiling",
        "was_cancelled": False,
    }  # fmt: skip
    if error is not None:
        code = {} if error == "TimeoutError" else {"code": 400}
        return {"metadata": metadata, "metrics": {}, "error": {**code, "type": error, "message": "x"}}
    metrics = {
        "request_latency": {"value": seconds * 1e3, "unit": "ms"},
        "time_to_first_token": {"value": 50.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [25.5, 31.9], "unit": "ms"},
        "usage_prompt_tokens": {"value": 14, "unit": "tokens"},
        "usage_completion_tokens": {"value": tokens, "unit": "tokens"},
        "output_sequence_length": {"value": tokens, "unit": "tokens"},
    }
    acceptance = {"engine": "vllm", "num_accepted_draft_tokens": 15, "num_draft_tokens": 26, "num_spec_steps": 4}
    return {"metadata": metadata, "metrics": metrics, "spec_decode_acceptance": acceptance}


def percentiles(unit: str, value: float) -> Json:
    return {"unit": unit, "avg": value, "p50": value, "p90": 2 * value, "p99": 3 * value, "min": 0.1, "count": 8}


def summary(**changed: object) -> Json:
    """profile_export_aiperf.json."""
    whole = {"schema_version": "1.4", "aiperf_version": "0.13.0", "was_cancelled": False, "is_complete": True}
    metrics = {
        "request_count": {"unit": "requests", "avg": 8.0},
        "benchmark_duration": {"unit": "sec", "avg": 0.75},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 60.0},
        "output_token_throughput_per_user": percentiles("tokens/sec/user", 75.0),
        "time_to_first_token": percentiles("ms", 50.0),
        "inter_token_latency": percentiles("ms", 13.5),
    }
    return {**whole, **metrics, "error_summary": [], **changed}


def write_export(folder: Path, records: Iterable[Json], **changed: object) -> Path:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary(**changed)))
    return folder
