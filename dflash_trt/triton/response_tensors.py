# SPDX-License-Identifier: Apache-2.0
"""Writes an answer as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_trt.api.completion import Completion
from dflash_trt.triton.tensors import OUTPUTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NO_REASON = "None"
"""NVIDIA's model sends this text where there is no reason."""
DATA_TYPES = {spec.name: spec.data_type for spec in OUTPUTS}
# Output tensor -> name of the metric in TensorRT-LLM, the only runtime that measures it.
KV_CACHE = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
    "kv_cache_hit_rate": "kv_cache_hit_rate",
}
Values = dict[str, str | float | int]


def response_tensors(
    text: str, completion: Completion | None, returns: frozenset[str]
) -> dict[str, npt.NDArray[np.generic]]:
    """The output tensors by name, with a completion also `returns`; unknown values are left out."""
    values: Values = {"text_output": text}
    if completion is not None:
        values |= _requested(completion, returns)
    return {name: _tensor(name, value) for name, value in values.items()}


def _requested(completion: Completion, returns: frozenset[str]) -> Values:
    values: Values = {}
    if "finish_reason" in returns:
        values["finish_reason"] = str(completion.finish_reason)
    if "stop_reason" in returns:
        values["stop_reason"] = NO_REASON if completion.stop_reason is None else str(completion.stop_reason)
    if "cumulative_logprob" in returns and completion.cumulative_logprob is not None:
        values["cumulative_logprob"] = completion.cumulative_logprob
    if "perf_metrics" in returns:
        values |= _perf_metrics(completion)
    return values


def _perf_metrics(completion: Completion) -> Values:
    times = {
        "arrival_time_ns": 0.0,
        "first_scheduled_time_ns": completion.queue_seconds,
        "first_token_time_ns": completion.ttft_seconds,
        "last_token_time_ns": completion.seconds,
    }
    values: Values = {
        name: round((completion.arrived + seconds) * 1e9) for name, seconds in times.items() if seconds is not None
    }
    if (acceptance := completion.acceptance) is not None and acceptance.proposed is not None:
        values |= {
            "acceptance_rate": acceptance.accepted / acceptance.proposed if acceptance.proposed else 0.0,
            "total_accepted_draft_tokens": acceptance.accepted,
            "total_draft_tokens": acceptance.proposed,
            "acceptance_length": acceptance.tau or 0.0,
        }
    metrics = completion.other_metrics
    values |= {tensor: metrics[name] for tensor, name in KV_CACHE.items() if name in metrics}
    return values | {"num_output_tokens": len(completion.token_ids)}


def _tensor(name: str, value: str | float | int) -> npt.NDArray[np.generic]:
    import numpy as np

    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    return np.array([value], dtype={"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[DATA_TYPES[name]])
