# SPDX-License-Identifier: Apache-2.0
"""The official client, streamed and not: texts, tokens and figures are those of LLM.generate."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from tests.runtime.server.live import MODEL, Live

PROMPT = "def parse_args(argv):"
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]
OURS: list[dict[str, Any]] = [
    {},
    {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.1},
    {"draft_length": 2},
    {"draft_length": 0},
    {"ignore_eos": True, "stop_token_ids": [13]},
]


def expected(live: Live, prompt: str | list[int] = PROMPT, **settings: Any) -> Completion:
    return live.llm.generate(prompt, SamplingParams(**{"max_tokens": 24, **settings}))[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ours", OURS, ids=str)
def test_completion(live: Live, settings: dict[str, Any], ours: dict[str, Any]) -> None:
    answer = expected(live, **settings, **ours)
    given = live.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, extra_body=ours, **settings)
    (choice,) = given.choices
    assert (choice.text, choice.finish_reason) == (answer.text, answer.finish_reason)
    assert given.usage is not None
    assert given.usage.completion_tokens == len(answer.token_ids)
    assert given.usage.prompt_tokens == len(live.llm.backend.encode(PROMPT))
    assert choice.stop_reason == answer.stop_reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_streamed_completion(live: Live, settings: dict[str, Any]) -> None:
    answer = expected(live, **settings)
    stream = live.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, stream=True, stream_options={"include_usage": True}, **settings
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [answer.finish_reason]
    assert len(chunks) > 2
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(answer.token_ids)


def test_chat(live: Live) -> None:
    messages: Any = [
        {"role": "system", "content": "code"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    plain = [{"role": "system", "content": "code"}, {"role": "user", "content": "x"}]
    answer = live.llm.chat(plain, SamplingParams(max_tokens=20))[0]
    client = live.openai()
    given = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=20, temperature=0)
    assert (given.choices[0].message.content, given.choices[0].message.role) == (answer.text, "assistant")
    chunks = list(client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=20, temperature=0, stream=True
    ))  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.full
def test_chat_without_max_tokens_ends_where_it_must(live: Live) -> None:
    """Room for it is reserved, and no more than there is."""
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "stop": ["("]}
    given = live.post("/v1/chat/completions", **body).json()
    assert given["choices"][0]["finish_reason"] in ("stop", "length")


def test_stop_text(live: Live) -> None:
    whole = expected(live).text
    stop = whole[6:9]
    given = live.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop)
    assert given.choices[0].text == whole[: whole.index(stop)]
    assert given.choices[0].finish_reason == "stop"
    assert given.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    streamed = live.events(prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop])
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole[: whole.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(live: Live, stream: bool) -> None:
    answer = expected(live, logprobs=True, temperature=0.7, seed=3)
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.7, "seed": 3, "logprobs": 0}
    parts = live.events(**body) if stream else [live.complete(**body)]
    logprobs = [part["choices"][0]["logprobs"] for part in parts]
    assert [value for part in logprobs for value in part["token_logprobs"]] == pytest.approx(answer.logprobs, abs=1e-4)
    tokens = [token for part in logprobs for token in part["tokens"]]
    assert "".join(tokens) == answer.text
    offsets = [offset for part in logprobs for offset in part["text_offset"]]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


def test_several_prompts_and_answers(live: Live) -> None:
    prompts = ["def a(", "import os\n", "class Stack:"]
    answers = [expected(live, prompt, temperature=1, seed=seed) for prompt in prompts for seed in (5, 6)]
    body = {"prompt": prompts, "max_tokens": 24, "n": 2, "seed": 5}
    given = live.complete(**body)
    assert [choice["index"] for choice in given["choices"]] == list(range(6))
    assert [choice["text"] for choice in given["choices"]] == [answer.text for answer in answers]
    assert given["usage"]["completion_tokens"] == sum(len(answer.token_ids) for answer in answers)
    assert given["metrics"] is None
    texts = [""] * 6
    for event in live.events(**body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [answer.text for answer in answers]


def test_cached_tokens_of_a_prompt(live: Live) -> None:
    """Of each prompt once, as its tokens."""
    prompt = list(range(300, 400))
    first, second = (live.complete(prompt=prompt, max_tokens=1, n=2)["usage"] for _ in range(2))
    counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
    assert 0 == counts[0] < counts[1] < len(prompt) == first["prompt_tokens"]


def test_token_ids(live: Live) -> None:
    ids = live.post("/tokenize", prompt=PROMPT).json()
    assert ids["tokens"] == live.llm.backend.encode(PROMPT)
    assert ids["count"] == len(ids["tokens"])
    answer = expected(live)
    for prompt in (ids["tokens"], [ids["tokens"], ids["tokens"]]):
        given = live.complete(prompt=prompt, max_tokens=24, temperature=0)
        assert {choice["text"] for choice in given["choices"]} == {answer.text}


def test_the_default_temperature_is_openais(live: Live) -> None:
    sampled = expected(live, temperature=1.0, seed=11)
    assert live.complete(prompt=PROMPT, max_tokens=24, seed=11)["choices"][0]["text"] == sampled.text
    assert sampled.text != expected(live).text


def test_the_default_length_is_openais(live: Live) -> None:
    assert live.complete(prompt=PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_acceptance_of_a_request(live: Live) -> None:
    """In vLLM's shape: metrics.speculative_decoding."""
    acceptance = expected(live).acceptance
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    found = [live.complete(**body), live.events(**body)[-1]]
    found.append(live.events(**body, stream_options={"include_usage": True})[-1])
    for given in found:
        figures = given["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] == acceptance.accepted
        assert figures["num_draft_tokens"] == acceptance.proposed
        histogram = figures["acceptance_histogram"]
        assert sum(histogram) == figures["num_spec_steps"] == acceptance.drafting_passes
        assert sum(j * steps for j, steps in enumerate(histogram)) == acceptance.accepted
        assert figures["mean_acceptance_length"] == acceptance.tau_of_drafting_passes
        assert len(histogram) == figures["num_spec_tokens"] + 1 == 8
        assert given["metrics"]["tokens_per_second"] > 0


def test_plain_decoding_of_one_request(live: Live) -> None:
    given = live.complete(prompt=PROMPT, max_tokens=24, temperature=0, draft_length=0)
    assert given["choices"][0]["text"] == expected(live).text
    assert given["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_the_other_paths(live: Live) -> None:
    (model,) = live.openai().models.list().data
    assert model.id == MODEL
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/version").json()["version"]
    messages = [{"role": "user", "content": "x"}]
    assert live.post("/tokenize", messages=messages).json()["tokens"] == live.llm.backend.encode_chat(messages)
    for path, kind in (("/", "text/html"), ("/page/page.css", "text/css"), ("/page/page.js", "text/javascript")):
        response = live.http.get(path)
        assert (response.status_code, response.headers["content-type"].split(";")[0]) == (200, kind)
