# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver answers what `dflash-trt generate` answers: HTTP, server-sent events and gRPC."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run_here
from tests.triton.conftest import TARGET
from tests.triton.grpc_client import GrpcClient
from tests.triton.server import RefusedError, Server

PROMPT = "def parse_args(argv):"
TOKENS = 40
BODY = {
    "text_input": PROMPT,
    "sampling_param_max_tokens": TOKENS,
    "sampling_param_return_perf_metrics": True,
    "return_finish_reason": True,
}


@pytest.fixture(scope="module")
def expected(engine: Path) -> dict[str, Any]:
    """What the command line says."""
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())) as printed:
        run_here(
            "generate", engine, PROMPT, "--target", TARGET, "--max-tokens", TOKENS, "--draft-length", "7", "--json"
        )
        printed.seek(0)
    answer: dict[str, Any] = json.load(printed)["requests"][0]
    assert answer["accepted"] > 0
    return answer


def check_figures(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Token counts and acceptance figures are the command line's, and agree with each other."""
    assert answer["num_output_tokens"] == len(expected["token_ids"])
    assert answer["total_draft_tokens"] == expected["proposed"]
    assert answer["total_accepted_draft_tokens"] == expected["accepted"]
    assert answer["acceptance_rate"] == pytest.approx(expected["accepted"] / expected["proposed"])
    assert answer["acceptance_length"] == pytest.approx(expected["tau"])
    assert answer["finish_reason"] == expected["finish_reason"] == "length"
    times = [answer[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)


def test_one_answer(server: Server, expected: dict[str, Any]) -> None:
    answer = server.generate(BODY)
    assert answer["text_output"] == expected["text"]
    check_figures(answer, expected)


def test_figures_come_when_asked_for(server: Server) -> None:
    answer = server.generate({"text_input": PROMPT})
    assert answer.keys() == {"model_name", "model_version", "text_output"}


def test_server_sent_events(server: Server, expected: dict[str, Any]) -> None:
    events = list(server.stream(BODY))
    texts = [event["text_output"] for event in events]
    assert len(texts) > 3
    assert texts[-1] == expected["text"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    check_figures(events[-1], expected)
    assert "acceptance_rate" not in events[0]


def test_grpc_stream(server: Server, expected: dict[str, Any]) -> None:
    with GrpcClient(server) as client:
        responses = list(client.stream({**BODY, "streaming": True}))
    assert len(responses) > 3
    assert responses[-1]["text_output"] == expected["text"]
    check_figures(responses[-1], expected)


def test_metrics_page(server: Server) -> None:
    names = ("dflash_draft_tokens", "dflash_accepted_draft_tokens", "dflash_output_tokens")
    before = [server.reading(name) for name in names]
    requests = server.reading("nv_inference_request_success")
    answer = server.generate(BODY)
    drafted, accepted, tokens = (start + answer[name] for start, name in zip(before, (
        "total_draft_tokens", "total_accepted_draft_tokens", "num_output_tokens"), strict=True))  # fmt: skip
    assert [server.reading(name) for name in names] == [drafted, accepted, tokens]
    assert server.reading("nv_inference_request_success") == requests + 1


def test_a_refusal_says_why(server: Server) -> None:
    with pytest.raises(RefusedError, match="max_tokens: expected at least 1, found -1"):
        server.generate({**BODY, "sampling_param_max_tokens": -1})
