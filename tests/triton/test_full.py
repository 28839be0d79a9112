# SPDX-License-Identifier: Apache-2.0
"""A real server under load and in need: settings are honoured, many clients come and leave, 200 requests are refused.

The expected answers are those of the same runtime in this process. Killed in mid-stream, the model process ends its
server, so that it can be restarted.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests.triton.server import LOOPBACK, GrpcClient, RefusedError, Server, environment, tensor
from tests.waiting import PATIENCE

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
        "invalid UTF-8 stop text": [prompt, tensor("sampling_param_stop", [b"ok", b"\x80"])], "no inputs": [],
        "prompt with two dimensions": [flat], "prompt of numbers": [tensor("text_input", 1, "INT32")],
        "max_tokens of another type": [prompt, tensor("sampling_param_max_tokens", 8.0, "FP32")],
        "seed of another type": [prompt, tensor("sampling_param_seed", 8, "INT32")],
        "two temperatures": [prompt, tensor("sampling_param_temperature", [1.0, 2.0])],
        "temperature that is no number": [prompt, tensor("sampling_param_temperature", float("nan"))],
        "endless temperature": [prompt, tensor("sampling_param_temperature", float("inf"))],
        "unknown input": [prompt, tensor("lora_id", 1, "UINT64")], "empty prompt": [tensor("text_input", "")],
        "missing prompt": [tensor("sampling_param_max_tokens", 8)],
    }  # fmt: skip


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
    with pytest.raises(RefusedError, match=r'data: {"error":"max_tokens: expected at least 1, found -1"}'):
        list(server.stream({**GOOD, "sampling_param_max_tokens": -1}))


CLIENTS = 32
PROMPTS = ["def parse_args(argv):", "import os\n", "class Stack:\n    def push(self, x):", "# sort a list\n"]
STREAMED = {"text_input": PROMPTS[0], "streaming": True, "sampling_param_max_tokens": 1500}


def test_32_streams_at_once(server: Server, llm: LLM) -> None:
    """All are right, and each has its first text before any has its last."""

    def client(index: int) -> tuple[str, float, float]:
        body = {"text_input": PROMPTS[index % 4], "sampling_param_max_tokens": 160 + index}
        sampling = {"sampling_param_temperature": 1.0, "sampling_param_seed": index}
        events = server.stream({**body, **sampling})
        last = next(events)
        first_at = time.monotonic()
        for event in events:
            last = event
        return str(last["text_output"]), first_at, time.monotonic()

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(client, range(CLIENTS), timeout=2 * PATIENCE))
    params = [SamplingParams(max_tokens=160 + i, temperature=1.0, seed=i) for i in range(CLIENTS)]
    expected = llm.generate([PROMPTS[i % 4] for i in range(CLIENTS)], params)
    assert [text for text, _, _ in answers] == [completion.text for completion in expected]
    assert max(first for _, first, _ in answers) < min(end for _, _, end in answers)


def test_clients_that_leave_free_their_slots(server: Server) -> None:
    tokens = server.reading("dflash_output_tokens")
    client = GrpcClient(server)
    next(client.stream(STREAMED))
    server.await_reading("dflash_free_slots", 31)
    client.leave()
    server.await_reading("dflash_free_slots", 32)
    assert server.reading("dflash_output_tokens") - tokens < 1500
    tokens = server.reading("dflash_output_tokens")
    body = json.dumps(STREAMED).encode()
    head = f"POST /v2/models/tensorrt_llm/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((LOOPBACK, server.http), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        server.await_reading("dflash_free_slots", 31)
    server.await_reading("dflash_free_slots", 32)
    assert server.reading("dflash_output_tokens") - tokens < 1500


LONG = {"text_input": "import os\n", "sampling_param_max_tokens": 1500}


def test_killed_in_mid_stream(repository: Path, tmp_path: Path) -> None:
    server = Server(environment(), repository, tmp_path / "log")
    has_begun = threading.Semaphore(0)

    def over_http() -> None:
        for _ in server.stream(LONG):
            has_begun.release()

    def over_grpc() -> None:
        with GrpcClient(server) as client:
            for _ in client.stream({**LONG, "streaming": True}):
                has_begun.release()

    try:
        server.await_ready()
        with ThreadPoolExecutor(2) as pool:
            clients: list[Future[None]] = [pool.submit(over_http), pool.submit(over_grpc)]
            for _ in range(8):
                assert has_begun.acquire(timeout=PATIENCE)
            os.kill(server.model_process(), signal.SIGKILL)
            errors = [client.exception(PATIENCE) for client in clients]
        assert isinstance(errors[0], (http.client.IncompleteRead, ConnectionError)), errors
        assert isinstance(errors[1], RefusedError), errors
        server.process.wait(PATIENCE)
        assert b"has died; terminating " in server.log.read_bytes()
    finally:
        server.stop()


def test_a_killed_server_takes_its_model_along(repository: Path, tmp_path: Path) -> None:
    server = Server(environment(), repository, tmp_path / "log")
    server.await_ready()
    model = os.pidfd_open(server.model_process())
    server.process.kill()
    assert select.select([model], [], [], PATIENCE)[0]


def test_an_orderly_end_leaves_nothing_behind(repository: Path, tmp_path: Path) -> None:
    server = Server(environment(), repository, tmp_path / "log")
    server.await_ready()
    model = server.model_process()
    server.stop()
    assert server.process.returncode == 0
    assert not Path(f"/proc/{model}").exists()
    assert b"has died" not in server.log.read_bytes()
    watchdogs = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_watchdog_of(path, model)]
    assert watchdogs == []


def _is_watchdog_of(cmdline: Path, model: int) -> bool:
    try:
        words = cmdline.read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return False
    return b"dflash_trt.triton.watchdog" in words and str(model).encode() in words


pytestmark = pytest.mark.full
PROMPT = "class Stack:\n    def push(self, x):"


@pytest.mark.parametrize("seed", [7, 2**64 - 1])
@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        ({"temperature": 0.75}, {"temperature": 0.75}),
        ({"temperature": 1.5, "top_k": 20}, {"temperature": 1.5, "top_k": 20}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"temperature": 1.0, "presence_penalty": 1.5}, {"temperature": 1.0, "presence_penalty": 1.5}),
        ({"temperature": 1.0, "frequency_penalty": 0.5}, {"temperature": 1.0, "frequency_penalty": 0.5}),
    ],
)
def test_sampling(server: Server, llm: LLM, seed: int, inputs: dict[str, float], settings: dict[str, float]) -> None:
    body = {f"sampling_param_{name}": value for name, value in {**inputs, "seed": seed, "max_tokens": 24}.items()}
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24, seed=seed, **settings))[0]  # type: ignore[arg-type]
    assert server.generate({"text_input": PROMPT, **body})["text_output"] == expected.text
    greedy = llm.generate(PROMPT, SamplingParams(max_tokens=24))[0]
    assert expected.text != greedy.text


def test_defaults_and_what_is_returned(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=32))[0]
    answer = server.generate({"text_input": PROMPT, "sampling_param_return_perf_metrics": True})
    assert answer["text_output"] == expected.text
    assert answer["num_output_tokens"] == 32
    answer = server.generate({"text_input": PROMPT, "return_stop_reason": True})
    assert answer["stop_reason"] == "None"
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=32, logprobs=True))[0].logprobs
    answer = server.generate({"text_input": PROMPT, "return_cumulative_logprob": True})
    assert answer["cumulative_logprob"] == pytest.approx(sum(expected), rel=1e-5)


@pytest.mark.parametrize("stop", [["XXX"], ["nowhere to be found", "XXX", "The"]])
def test_stop_texts(server: Server, llm: LLM, stop: list[str]) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=64))[0].text
    first = min((text for text in stop if text in whole), key=whole.index)
    body = {"text_input": PROMPT, "sampling_param_stop": stop, "sampling_param_max_tokens": 64}
    answer = server.generate({**body, "return_finish_reason": True, "return_stop_reason": True})
    assert answer["text_output"] == whole[: whole.index(first)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", first)


def test_the_prompt_comes_back_when_asked_for(server: Server, llm: LLM) -> None:
    answer = llm.generate(PROMPT, SamplingParams(max_tokens=32))[0].text
    for is_excluded, expected in ((False, f"{PROMPT}{answer}"), (True, answer)):
        body = {"text_input": PROMPT, "sampling_param_exclude_input_from_output": is_excluded}
        assert server.generate(body)["text_output"] == expected


def test_a_stop_request_ends_the_requests_of_its_id(server: Server) -> None:
    body = {"text_input": PROMPT, "streaming": True, "sampling_param_max_tokens": 1500}
    with GrpcClient(server) as running, GrpcClient(server) as other:
        answers = running.stream(body, request_id="42")
        next(answers)
        with pytest.raises(RefusedError, match="stopped 0 requests with the id 41"):
            next(other.stream({"text_input": PROMPT, "stop": True}, request_id="41"))
        next(answers)
        with pytest.raises(RefusedError, match="stopped 1 requests with the id 42"):
            next(other.stream({"text_input": PROMPT, "stop": True}, request_id="42"))
        with pytest.raises(RefusedError, match="cancelled"):
            list(answers)
        with pytest.raises(RefusedError, match="missing request id"):
            next(other.stream({"text_input": PROMPT, "stop": True}))
