# SPDX-License-Identifier: Apache-2.0
"""What is read from a request's tensors, and what an answer becomes."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.errors import RequestError
from dflash_trt.triton.embedded_backend import sampling_params
from dflash_trt.triton.request_inputs import is_stop, read_ask
from dflash_trt.triton.response import Answer, Ending, answer_tensors
from dflash_trt.triton.trtllm_backend import sampling_arguments

PROMPT = np.array([b"Gr\xc3\xbc\xc3\x9fe"], dtype=np.object_)


def test_what_is_given_is_read_and_no_more() -> None:
    ask = read_ask(
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
    assert (ask.prompt, ask.streaming) == ("Grüße", True)
    assert ask.sampling == {"seed": 2**64 - 1, "stop": ("a", "b")}
    assert ask.returns == {"finish_reason", "perf_metrics"}


def test_defaults() -> None:
    ask = read_ask({"text_input": PROMPT})
    assert (ask.sampling, ask.streaming, ask.returns) == ({}, False, frozenset())
    params = sampling_params(ask)
    assert (params.max_tokens, params.temperature, params.logprobs) == (32, 0.0, False)
    assert sampling_arguments(ask) == {"return_perf_metrics": False}


def test_two_values_where_one_belongs() -> None:
    with pytest.raises(RequestError, match="sampling_param_top_k: expected one value, found 2"):
        read_ask({"text_input": PROMPT, "sampling_param_top_k": np.array([1, 2], dtype=np.int32)})


@pytest.mark.parametrize(("value", "expected"), [([True], True), ([False], False), (None, False)])
def test_stop_requests(value: list[bool] | None, expected: bool) -> None:
    assert is_stop({} if value is None else {"stop": np.array(value)}) is expected


def test_tensors_of_an_answer() -> None:
    ending = Ending(
        finish_reason="stop",
        stop_reason=None,
        cumulative_logprob=None,
        perf_metrics={"acceptance_rate": 0.5, "total_draft_tokens": 4, "arrival_time_ns": 2**40},
    )
    answer = Answer("ab", "b", ending)
    assert answer_tensors(Answer("ab", "b", None), frozenset({"finish_reason"}), deltas=True) == {"text_output": [b"b"]}
    wanted = frozenset({"finish_reason", "stop_reason", "cumulative_logprob", "perf_metrics"})
    tensors = answer_tensors(answer, wanted, deltas=False)
    assert {name: (tensor.dtype.name, tensor.tolist()) for name, tensor in tensors.items()} == {
        "text_output": ("object", [b"ab"]),
        "finish_reason": ("object", [b"stop"]),
        "stop_reason": ("object", [b"None"]),
        "acceptance_rate": ("float32", [0.5]),
        "total_draft_tokens": ("int32", [4]),
        "arrival_time_ns": ("int64", [2**40]),
    }
    assert answer_tensors(answer, frozenset(), deltas=False).keys() == {"text_output"}
