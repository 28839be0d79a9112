# SPDX-License-Identifier: Apache-2.0
"""What is read from a request's tensors, and what an answer becomes."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.triton.service import response_tensors
from dflash_trt.triton.tensors import is_stop, read_inputs

PROMPT = np.array([b"Gr\xc3\xbc\xc3\x9fe"], dtype=np.object_)


def test_what_is_given_is_read_and_no_more() -> None:
    inputs = read_inputs(
        {
            "text_input": PROMPT,
            "streaming": np.array([True]),
            "sampling_param_seed": np.array([2**64 - 1], dtype=np.uint64),
            "sampling_param_stop": np.array([b"a", b"b"], dtype=np.object_),
            "sampling_param_return_perf_metrics": np.array([True]),
            "return_finish_reason": np.array([True]),
            "return_stop_reason": np.array([False]),
        }
    )
    assert (inputs.prompt, inputs.streaming) == ("Grüße", True)
    assert inputs.params == SamplingParams(max_tokens=32, seed=2**64 - 1, stop=("a", "b"))
    assert inputs.returns == {"finish_reason", "perf_metrics"}


def test_defaults() -> None:
    inputs = read_inputs({"text_input": PROMPT})
    assert (inputs.streaming, inputs.echo, inputs.returns) == (False, False, frozenset())
    assert inputs.params == SamplingParams(max_tokens=32, temperature=0.0, logprobs=False)


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.5)])
def test_who_says_how_to_draw_wants_it_drawn(name: str, value: float) -> None:
    inputs = read_inputs({"text_input": PROMPT, f"sampling_param_{name}": np.array([value])})
    assert inputs.params.temperature == 1.0
    assert getattr(inputs.params, name) == value


def test_one_answer_only() -> None:
    with pytest.raises(RequestError, match=r"sampling_param_best_of: expected 1, .* found 2"):
        read_inputs({"text_input": PROMPT, "sampling_param_best_of": np.array([2])})


@pytest.mark.parametrize(
    ("streaming", "excluded", "echo"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_prompt_comes_back_in_a_whole_answer(streaming: bool, excluded: bool, echo: bool) -> None:
    tensors = {"streaming": np.array([streaming]), "sampling_param_exclude_input_from_output": np.array([excluded])}
    assert read_inputs({"text_input": PROMPT, **tensors}).echo is echo


def test_two_values_where_one_belongs() -> None:
    with pytest.raises(RequestError, match="sampling_param_top_k: expected one value, found 2"):
        read_inputs({"text_input": PROMPT, "sampling_param_top_k": np.array([1, 2], dtype=np.int32)})


@pytest.mark.parametrize(("value", "expected"), [([True], True), ([False], False), (None, False)])
def test_stop_requests(value: list[bool] | None, expected: bool) -> None:
    assert is_stop({} if value is None else {"stop": np.array(value)}) is expected


def test_tensors_of_an_answer() -> None:
    completion = Completion(
        token_ids=[1, 2, 3], text="ab", finish_reason="stop", stop_reason=None, logprobs=None, cumulative_logprob=None,
        seed=None, arrived=1024.0,
        acceptance=Acceptance(passes=1, drafting_passes=1, emitted=2, proposed=4, accepted=2),
        queue_seconds=0.25, ttft_seconds=0.5, itl_seconds=None, seconds=1.0, other_metrics={"num_reused_blocks": 3},
    )  # fmt: skip
    assert response_tensors("b", None, frozenset({"finish_reason"})) == {"text_output": [b"b"]}
    wanted = frozenset({"finish_reason", "stop_reason", "cumulative_logprob", "perf_metrics"})
    tensors = response_tensors("ab", completion, wanted)
    assert {name: (tensor.dtype.name, tensor.tolist()) for name, tensor in tensors.items()} == {
        "text_output": ("object", [b"ab"]),
        "finish_reason": ("object", [b"stop"]),
        "stop_reason": ("object", [b"None"]),
        "arrival_time_ns": ("int64", [1024 * 10**9]),
        "first_scheduled_time_ns": ("int64", [1024_250_000_000]),
        "first_token_time_ns": ("int64", [1024_500_000_000]),
        "last_token_time_ns": ("int64", [1025 * 10**9]),
        "acceptance_rate": ("float32", [0.5]),
        "total_accepted_draft_tokens": ("int32", [2]),
        "total_draft_tokens": ("int32", [4]),
        "acceptance_length": ("float32", [2.0]),
        "kv_cache_reused_block": ("int32", [3]),
        "num_output_tokens": ("int32", [3]),
    }
    assert response_tensors("ab", completion, frozenset()).keys() == {"text_output"}
