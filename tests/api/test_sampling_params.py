# SPDX-License-Identifier: Apache-2.0
"""Every sampler setting reaches the sampling rule and each front end under its own name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_trt.api.sampling_params import NUMBERS, SAMPLER_FIELDS, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.dynamo.generate_request import read_request
from dflash_trt.runtime.server.requests import parse_request
from dflash_trt.triton.tensors import INPUTS, read_inputs
from dflash_trt.trtllm.llm_backend import sampling_arguments

VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.125,
    "frequency_penalty": -0.5, "seed": 2**64 - 1,
}  # fmt: skip
NUMPY = {"FP32": np.float32, "INT32": np.int32, "UINT64": np.uint64}


def test_all_settings_arrive_everywhere() -> None:
    assert VALUES.keys() == SAMPLER_FIELDS.keys()
    params = SamplingParams(**VALUES)
    sampler = params.sampler()
    assert {name: getattr(sampler, name) for name in VALUES} == VALUES
    types = {spec.name: NUMPY.get(spec.data_type) for spec in INPUTS}
    tensors = {f"sampling_param_{name}": np.array([value]) for name, value in VALUES.items()}
    tensors = {name: tensor.astype(types[name]) for name, tensor in tensors.items()}
    asked = [
        parse_request({"prompt": "a", **VALUES}, "m", 100, None, is_chat=False).params,
        read_request({"token_ids": [1], "sampling_options": VALUES}, 100)[1],
        read_inputs({"text_input": np.array([b"a"]), **tensors}).params,
    ]
    assert [{name: getattr(each, name) for name in VALUES} for each in asked] == [VALUES] * 3
    assert sampling_arguments(params, is_speculative=False).items() >= VALUES.items()


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds(name: str) -> None:
    field = NUMBERS[name]
    for bound, beyond in ((field.bounds.low, -1), (field.bounds.high, 1)):
        if abs(bound) < 1e300:
            number = field.type(bound)
            assert getattr(SamplingParams(**{name: number}), name) == number
            over = number + beyond * (2 if name == "top_k" else 1)  # top_k: -1 is 0
            with pytest.raises(RequestError, match=f"^{name}: expected "):
                SamplingParams(**{name: over})
