# SPDX-License-Identifier: Apache-2.0
"""Many clients at once, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests.triton.grpc_client import GrpcClient
from tests.triton.server import LOOPBACK, PATIENCE, Server

pytestmark = pytest.mark.full
CLIENTS = 32
PROMPTS = ["def parse_args(argv):", "import os\n", "class Stack:\n    def push(self, x):", "# sort a list\n"]
LONG = {"text_input": PROMPTS[0], "streaming": True, "sampling_param_max_tokens": 1500}


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


def test_a_grpc_client_that_leaves_frees_its_slot(server: Server) -> None:
    tokens = server.reading("dflash_output_tokens")
    client = GrpcClient(server)
    next(client.stream(LONG))
    server.await_reading("dflash_free_slots", 31)
    client.leave()
    server.await_reading("dflash_free_slots", 32)
    assert server.reading("dflash_output_tokens") - tokens < 1500


def test_an_http_client_that_leaves_frees_its_slot(server: Server) -> None:
    tokens = server.reading("dflash_output_tokens")
    body = json.dumps(LONG).encode()
    head = f"POST /v2/models/tensorrt_llm/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((LOOPBACK, server.http), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        server.await_reading("dflash_free_slots", 31)
    server.await_reading("dflash_free_slots", 32)
    assert server.reading("dflash_output_tokens") - tokens < 1500
