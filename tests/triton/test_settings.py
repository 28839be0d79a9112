# SPDX-License-Identifier: Apache-2.0
"""Each setting of a request is honoured: the server answers what the same runtime answers in this process."""

from __future__ import annotations

import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests.triton.grpc_client import GrpcClient
from tests.triton.server import RefusedError, Server

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


def test_defaults_are_greedy_and_32_tokens(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=32))[0]
    answer = server.generate({"text_input": PROMPT, "sampling_param_return_perf_metrics": True})
    assert answer["text_output"] == expected.text
    assert answer["num_output_tokens"] == 32


@pytest.mark.parametrize("stop", [["XXX"], ["nowhere to be found", "XXX", "The"]])
def test_stop_texts(server: Server, llm: LLM, stop: list[str]) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=64))[0].text
    assert whole is not None
    first = min((text for text in stop if text in whole), key=whole.index)
    body = {"text_input": PROMPT, "sampling_param_stop": stop, "sampling_param_max_tokens": 64}
    answer = server.generate({**body, "return_finish_reason": True, "return_stop_reason": True})
    assert answer["text_output"] == whole[: whole.index(first)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", first)


def test_no_stop_reason(server: Server) -> None:
    answer = server.generate({"text_input": PROMPT, "return_stop_reason": True})
    assert answer["stop_reason"] == "None"


def test_cumulative_logprob(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=32, logprobs=True))[0].logprobs
    assert expected is not None
    answer = server.generate({"text_input": PROMPT, "return_cumulative_logprob": True})
    assert answer["cumulative_logprob"] == pytest.approx(sum(expected), rel=1e-5)


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
