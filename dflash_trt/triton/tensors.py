# SPDX-License-Identifier: Apache-2.0
"""Input and output tensors of the model, those of NVIDIA's llmapi model and a few of ours."""

from __future__ import annotations

import msgspec

from dflash_trt.api.fields import NumberField
from dflash_trt.api.sampling_params import SAMPLER_FIELDS

TEXT_INPUT = "text_input"
SAMPLING = "sampling_param_"
SAMPLING_STOP = f"{SAMPLING}stop"
ANY, ONE = -1, 1


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output."""

    name: str
    data_type: str
    """Triton's name for it, without TYPE_."""
    length: int
    """Size of the only dimension, or ANY."""


def _data_type(field: NumberField) -> str:
    if field.type is float:
        return "FP32"
    return "UINT64" if field.bounds.high > 2**31 - 1 else "INT32"


INPUTS = (
    TensorSpec(TEXT_INPUT, "STRING", ANY),  # the only one that is required
    TensorSpec("streaming", "BOOL", ONE),
    TensorSpec("sampling_param_best_of", "INT32", ONE),
    *(TensorSpec(f"{SAMPLING}{name}", _data_type(field), ONE) for name, field in SAMPLER_FIELDS.items()),
    TensorSpec("sampling_param_max_tokens", "INT32", ONE),
    TensorSpec("sampling_param_stop", "STRING", ANY),
    TensorSpec("sampling_param_exclude_input_from_output", "BOOL", ONE),
    TensorSpec("sampling_param_return_perf_metrics", "BOOL", ONE),
    TensorSpec("return_finish_reason", "BOOL", ONE),
    TensorSpec("return_stop_reason", "BOOL", ONE),
    TensorSpec("return_cumulative_logprob", "BOOL", ONE),
    TensorSpec("stop", "BOOL", ONE),
)
OUTPUTS = (
    TensorSpec("text_output", "STRING", ANY),
    TensorSpec("finish_reason", "STRING", ANY),
    TensorSpec("stop_reason", "STRING", ANY),
    TensorSpec("cumulative_logprob", "FP32", ANY),
    TensorSpec("kv_cache_reused_block", "INT32", ANY),
    TensorSpec("kv_cache_missed_block", "INT32", ANY),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", ANY),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32", ANY),
    TensorSpec("kv_cache_hit_rate", "FP32", ANY),
    TensorSpec("arrival_time_ns", "INT64", ONE),
    TensorSpec("first_scheduled_time_ns", "INT64", ONE),
    TensorSpec("first_token_time_ns", "INT64", ONE),
    TensorSpec("last_token_time_ns", "INT64", ONE),
    TensorSpec("acceptance_rate", "FP32", ONE),
    TensorSpec("total_accepted_draft_tokens", "INT32", ONE),
    TensorSpec("total_draft_tokens", "INT32", ONE),
    # Ours: the totals from which both rates are computed.
    TensorSpec("acceptance_length", "FP32", ONE),
    TensorSpec("num_output_tokens", "INT32", ONE),
)
