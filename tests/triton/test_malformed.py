# SPDX-License-Identifier: Apache-2.0
"""200 requests that cannot be served: each gets an error, and the server serves on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.triton.grpc_client import GrpcClient, tensor
from tests.triton.server import RefusedError, Server

pytestmark = pytest.mark.full
GOOD = {"text_input": "import os\n", "sampling_param_max_tokens": 8}
Inputs = list[triton.InferInput]


def http_requests() -> dict[str, dict[str, Any] | bytes]:
    changes: dict[str, dict[str, Any]] = {
        "empty prompt": {"text_input": ""},
        "two prompts": {"text_input": ["a", "b"]},
        "no prompts": {"text_input": []},
        "prompt of another type": {"text_input": 7},
        "prompt that is an object": {"text_input": {"a": "b"}},
        "over-long prompt": {"text_input": "def f():\n" * 20000},
        "over-long answer": {"sampling_param_max_tokens": 10**6},
        "negative max_tokens": {"sampling_param_max_tokens": -1},
        "no max_tokens": {"sampling_param_max_tokens": 0},
        "max_tokens in words": {"sampling_param_max_tokens": "many"},
        "two max_tokens": {"sampling_param_max_tokens": [1, 2]},
        "negative temperature": {"sampling_param_temperature": -1.0},
        "temperature in words": {"sampling_param_temperature": "hot"},
        "top_p of 0": {"sampling_param_top_p": 0.0},
        "top_p above 1": {"sampling_param_top_p": 1.5},
        "negative top_k": {"sampling_param_top_k": -3},
        "negative seed": {"sampling_param_seed": -1},
        "many beams": {"sampling_param_best_of": 4},
        "empty stop text": {"sampling_param_stop": ["a", ""]},
        "streaming in words": {"streaming": "yes"},
        "stop without an id": {"stop": True},
    }
    requests: dict[str, dict[str, Any] | bytes] = {name: {**GOOD, **change} for name, change in changes.items()}
    return requests | {
        "missing prompt": {"sampling_param_max_tokens": 8},
        "nothing": {},
        "no JSON": b"{",
        "a JSON list": b"[]",
        "no bytes": b"\0",
        "invalid UTF-8": json.dumps(GOOD).encode().replace(b"import", b"\xff\xfe"),
    }


def grpc_requests() -> dict[str, Inputs]:
    prompt = tensor("text_input", "import os\n")
    flat = triton.InferInput("text_input", [1, 1], "BYTES")
    flat.set_data_from_numpy(np.array([["import os\n"]], dtype=np.object_))
    return {
        "invalid UTF-8 prompt": [tensor("text_input", b"\xff\xfe")],
        "invalid UTF-8 stop text": [prompt, tensor("sampling_param_stop", [b"ok", b"\x80"])],
        "no inputs": [],
        "prompt with two dimensions": [flat],
        "prompt of numbers": [tensor("text_input", 1, "INT32")],
        "max_tokens of another type": [prompt, tensor("sampling_param_max_tokens", 8.0, "FP32")],
        "seed of another type": [prompt, tensor("sampling_param_seed", 8, "INT32")],
        "two temperatures": [prompt, tensor("sampling_param_temperature", [1.0, 2.0])],
        "temperature that is no number": [prompt, tensor("sampling_param_temperature", float("nan"))],
        "endless temperature": [prompt, tensor("sampling_param_temperature", float("inf"))],
        "unknown input": [prompt, tensor("lora_id", 1, "UINT64")],
        "empty prompt": [tensor("text_input", "")],
        "missing prompt": [tensor("sampling_param_max_tokens", 8)],
    }


def test_200_malformed_requests(server: Server) -> None:
    before = server.generate(GOOD)
    tokens = server.reading("dflash_output_tokens")
    sent = 0
    while sent < 200:
        for name, body in http_requests().items():
            with pytest.raises(RefusedError) as caught:
                pytest.fail(f"{name}: {server.generate(body)}")
            assert 400 <= caught.value.args[0] < 600, name
            assert json.loads(caught.value.args[1])["error"], name
            sent += 1
        for name, inputs in grpc_requests().items():
            with GrpcClient(server) as client, pytest.raises(RefusedError, match=r"\w"):
                pytest.fail(f"{name}: {list(client.stream(inputs))}")
            sent += 1
    assert server.reading("dflash_output_tokens") == tokens
    assert server.generate(GOOD) == before


def test_errors_arrive_in_a_stream_too(server: Server) -> None:
    with pytest.raises(RefusedError, match=r'data: {"error":"max_tokens: expected at least 1, found -1"}'):
        list(server.stream({**GOOD, "sampling_param_max_tokens": -1}))
