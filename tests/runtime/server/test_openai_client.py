# SPDX-License-Identifier: Apache-2.0
"""The official client, streamed and not: texts, tokens and figures are those of LLM.generate.

Each field of vLLM's requests is honoured, without effect, or refused by name: none is silently dropped. The fields are
those of vllm/entrypoints/openai/{completion,chat_completion}/protocol.py @ 002032e (July 2026).
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dflash_trt.api.acceptance import Step
from dflash_trt.api.backend import Chunk
from dflash_trt.api.chat_template import encode_chat
from dflash_trt.api.completion import Completion
from dflash_trt.api.neutral_fields import IGNORED, NEUTRAL_VALUES
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.server.answer.step_texts import StepTexts
from dflash_trt.runtime.server.request.request_fields import ChatBody, CompletionBody
from tests.runtime.server.live import MODEL, Live

PROMPT = "def parse_args(argv):"
SUPPORTED = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
PARAMS = SamplingParams(max_tokens=6, logprobs=True, top_logprobs=2, prompt_logprobs=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs(live: Live, stream: bool, as_ids: bool) -> None:
    expected = live.llm.generate(PROMPT, PARAMS)[0]
    body = {
        "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 2,
        "return_tokens_as_token_ids": as_ids,
    }  # fmt: skip
    parts = [each["choices"][0] for each in (live.events(**body) if stream else [live.complete(**body)])]
    assert "".join(part["text"] for part in parts) == f"{PROMPT}{expected.text}"
    given: dict[str, list[Any]] = {
        key: [item for part in parts for item in part["logprobs"][key]] for key in parts[0]["logprobs"]
    }
    ids = [*live.llm.backend.encode(PROMPT), *expected.token_ids]
    texts = [live.llm.backend.tokenizer.decode([token]) for token in ids]
    names = [f"token_id:{token}" for token in ids] if as_ids else texts
    assert given["tokens"] == names
    assert given["text_offset"] == [sum(map(len, names[:i])) for i in range(len(names))]
    assert given["token_logprobs"] == [None, *expected.prompt_logprobs.logprobs, *(expected.logprobs or [])]
    assert given["top_logprobs"][0] is None
    for name, logprob, top in list(zip(names, given["token_logprobs"], given["top_logprobs"], strict=True))[1:]:
        assert top[name] == logprob
        assert 2 <= len(top) <= 3
        assert list(top.values())[:2] == sorted(top.values(), reverse=True)[:2]


@pytest.mark.parametrize("prompt", [PROMPT, [7, 8, 9]])
def test_echo_without_an_answer(live: Live, prompt: Any) -> None:
    answer = live.complete(prompt=[prompt, prompt], max_tokens=0, echo=True, logprobs=1, n=2)
    text, ids = (prompt, live.llm.backend.encode(prompt)) if isinstance(prompt, str) else (
        live.llm.backend.tokenizer.decode(prompt), prompt
    )  # fmt: skip
    assert [choice["text"] for choice in answer["choices"]] == [text] * 4
    assert all(len(choice["logprobs"]["token_logprobs"]) == len(ids) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 0
    assert live.complete(prompt=prompt, max_tokens=0, echo=True)["choices"][0]["logprobs"] is None


def test_top_logprobs_of_a_chat(live: Live) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    expected = live.llm.chat(messages, PARAMS)[0]
    client = live.openai().chat.completions
    settings: dict[str, Any] = {"messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.create(model=MODEL, top_logprobs=2, **settings).choices[0].logprobs
    streamed = [
        item
        for chunk in client.create(model=MODEL, top_logprobs=2, stream=True, **settings)
        if chunk.choices and chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content or []
    ]
    assert [item.logprob for item in whole.content] == [item.logprob for item in streamed] == expected.logprobs
    assert b"".join(bytes(item.bytes or []) for item in whole.content).decode() == expected.text
    assert [[each.logprob for each in item.top_logprobs] for item in whole.content] == [
        list(top.values()) for top in expected.top_logprobs or []
    ]


STACK = "class Stack:\n    def push(self, x):"


def steps_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for part in parts for choice in part["choices"] for step in choice["steps"]]


@pytest.mark.parametrize(
    ("settings", "stream"), [({"temperature": 0}, True), ({"temperature": 1.5, "seed": 3}, False)], ids=str
)
def test_steps_are_the_decoders(live: Live, settings: dict[str, Any], stream: bool) -> None:
    answer = live.llm.generate(STACK, SamplingParams(max_tokens=32, **settings))[0]
    body = {"prompt": STACK, "max_tokens": 32, "return_steps": True, **settings}
    steps = steps_of(live.events(**body) if stream else [live.complete(**body)])
    assert steps[0]["is_prefill"]
    assert not steps[0]["proposals"]
    passes = steps[1:]
    assert not any(step["is_prefill"] for step in passes)
    assert [token["id"] for step in steps for token in step["tokens"]] == answer.token_ids
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == answer.text
    assert len(passes) == answer.acceptance.passes
    assert sum(len(step["proposals"]) for step in passes) == answer.acceptance.proposed
    assert sum(step["num_accepted"] for step in passes) == answer.acceptance.accepted
    for step in passes:
        accepted = step["proposals"][: step["num_accepted"]]
        assert accepted == step["tokens"][: step["num_accepted"]]
        assert all(token["text"] for token in step["proposals"])
        if len(step["proposals"]) > step["num_accepted"]:  # the target's own token is another than the rejected one
            assert step["tokens"][-1]["id"] != step["proposals"][step["num_accepted"]]["id"]


def test_texts_of_characters_in_pieces(live: Live) -> None:
    """A character of several tokens is the text of the last of them."""
    ids = live.llm.backend.encode("x = 'é世🙂'")
    texts = StepTexts(live.llm.backend.tokenizer)
    step = Step(token_ids=ids[1:], proposals=[*ids[1:-1], ids[0]], accepted=len(ids) - 2)
    read = texts.read(Chunk(text="", token_ids=ids, steps=[step], completion=None))
    assert "".join(token.text for part in read for token in part.tokens) == "x = 'é世🙂'"
    assert any(token.text == "" for part in read for token in part.tokens)


def test_draft_length_caps_the_proposals(live: Live) -> None:
    plain = live.complete(prompt=STACK, max_tokens=20, temperature=0)
    given = live.complete(prompt=STACK, max_tokens=20, temperature=0, draft_length=3, return_steps=True)
    assert given["choices"][0]["text"] == plain["choices"][0]["text"]
    assert max(len(step["proposals"]) for step in steps_of([given])) == 3
    assert "steps" not in plain["choices"][0], "nobody asked for them"


HONOURED = {
    "model", "prompt", "messages", "echo", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "seed", "stop", "stream", "stream_options", "temperature",
    "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "response_format",
    "structured_outputs", "return_tokens_as_token_ids", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "chat_template_kwargs",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "suffix": "x", "use_beam_search": True, "watermarking": True, "length_penalty": 2.0,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5, "truncation_side": "left", "allowed_token_ids": [1], "prompt_logprobs": 1,
    "logprob_token_ids": [1], "bad_words": ["x"], "prompt_embeds": "x", "add_special_tokens": False, "priority": 1,
    "session_id": "x", "return_token_ids": True, "routed_experts_prompt_start": 1,
    "return_token_offsets": True, "return_mm_kwargs": False, "cache_salt": "x", "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "repetition_detection": {"a": 1},
    "thinking_token_budget": 5, "stream_interval": 2, "include_reasoning": False, "add_generation_prompt": False,
    "continue_final_message": True, "documents": [{"a": "b"}], "chat_template": "x", "media_io_kwargs": {"a": {}},
    "mm_processor_kwargs": {"a": 1}, "return_prompt_text": True,
}  # fmt: skip
VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1, "stop": [], "stream": False, "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [],
    "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "bad_words": [], "echo": False, "priority": 0, "watermarking": False,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_mm_kwargs": True,
    "thinking_token_budget": -1, "stream_interval": 1, "tool_choice": "none", "parallel_tool_calls": True,
}  # fmt: skip
CHAT_DEFAULTS: dict[str, Any] = VLLM_DEFAULTS | {
    "logprobs": False, "top_logprobs": 0, "include_reasoning": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "return_prompt_text": False,
}  # fmt: skip


def test_defaults_of_vllm_may_be_spelled_out(live: Live) -> None:
    live.complete(prompt="x", max_tokens=1, add_special_tokens=True, **VLLM_DEFAULTS)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **CHAT_DEFAULTS}
    assert live.post("/v1/chat/completions", **chat).status_code == 200
    bodies: list[tuple[dict[str, Any], bool]] = [({"prompt": "x"}, True), ({"messages": chat["messages"]}, False)]
    for body, special in bodies:
        assert live.post("/tokenize", **body, add_special_tokens=special).status_code == 200
        refused = live.post("/tokenize", **body, add_special_tokens=not special).json()
        assert refused["error"]["param"] == "add_special_tokens"


def test_each_field_of_vllm(live: Live) -> None:
    assert SUPPORTED >= HONOURED
    assert NEUTRAL_VALUES["user"] is None
    assert not REFUSED.keys() & SUPPORTED
    requests: dict[str, Any] = {
        "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}
    }  # fmt: skip
    for path, request in requests.items():
        is_chat = "messages" in request
        for field, value in (REFUSED | {"add_special_tokens": is_chat}).items():
            response = live.post(path, **request, max_tokens=1, **{field: value})
            assert response.status_code == 400, field
            assert response.json()["error"]["param"] == field
        harmless = {field: values[0] for field, values in NEUTRAL_VALUES.items() if values and field not in SUPPORTED}
        harmless.pop("guided_decoding")  # Dynamo's
        harmless["add_special_tokens"] = not is_chat
        assert live.post(path, **request, max_tokens=1, **harmless).status_code == 200


def test_what_aiperf_sends(live: Live) -> None:
    """Fields of `--extra-inputs ignore_eos:true --extra-inputs min_tokens:N --per-chunk-usage`."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"n": 2, "max_tokens": 12, "min_tokens": 12, "ignore_eos": True, "temperature": 0, "stream_options": options}
    requests = {
        "/v1/completions": {"prompt": ["def f(", "import os\n"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    for path, request in requests.items():
        *events, last = live.events(path, **request, **body)
        total = last["usage"]
        counts: dict[int, list[Any]] = {}
        for event in events:
            counts.setdefault(event["choices"][0]["index"], []).append(event["usage"])
        for usages in counts.values():
            tokens = [usage["completion_tokens"] for usage in usages]
            assert tokens == sorted(tokens)
            assert (len(tokens) > 2, tokens[0] < 12, tokens[-1]) == (True, True, 12)
            assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
        assert total["completion_tokens"] == 12 * len(counts)
        assert total["prompt_tokens"] == sum(usages[0]["prompt_tokens"] for usages in counts.values()) // 2
    alone = live.events(prompt="x", max_tokens=4, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in event for event in alone)


def test_a_stop_text_of_a_chat_waits_for_min_tokens(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def answer(**fields: Any) -> str:
        return str(live.post("/v1/chat/completions", **chat, **fields).json()["choices"][0]["message"]["content"])

    text = answer()
    cut, whole = (answer(stop=text[1:3], min_tokens=least) for least in (0, 12))
    assert (cut, whole) == (text[: text.index(text[1:3])], text)


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_told(live: Live, stream: bool) -> None:
    ignored = {"verbosity": "low", "thinking": {"type": "enabled"}, "request_id": "a", "rid": ["b"]}
    given = {**ignored, "user": "u", "prediction": None}
    answer = live.post(prompt="x", max_tokens=1, stream=stream, **given)
    assert answer.status_code == 200
    assert answer.headers["warning"] == ", ".join(f'299 - "{name}: ignored: {IGNORED[name]}"' for name in ignored)
    assert not any(set(reason) & set('",\\\n') - {","} for reason in IGNORED.values())
    assert not IGNORED.keys() & (SUPPORTED | NEUTRAL_VALUES.keys())
    assert "warning" not in live.post(prompt="x", max_tokens=1, user="u").headers


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]
OURS: list[dict[str, Any]] = [
    {}, {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.1}, {"draft_length": 2}, {"draft_length": 0},
    {"ignore_eos": True, "stop_token_ids": [13]}, {"logit_bias": {300: 100.0}},
]  # fmt: skip


def expected(live: Live, prompt: str | list[int] = PROMPT, **settings: Any) -> Completion:
    return live.llm.generate(prompt, SamplingParams(**{"max_tokens": 24, **settings}))[0]


@pytest.mark.parametrize(("settings", "ours"), list(zip([*SETTINGS, *SETTINGS], OURS, strict=False)), ids=str)
def test_completion(live: Live, settings: dict[str, Any], ours: dict[str, Any]) -> None:
    answer = expected(live, **settings, **ours)
    given = live.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, extra_body=ours, **settings)
    (choice,) = given.choices
    assert (choice.text, choice.finish_reason) == (answer.text, answer.finish_reason)
    assert given.usage.completion_tokens == len(answer.token_ids)
    assert given.usage.prompt_tokens == len(live.llm.backend.encode(PROMPT))
    assert choice.stop_reason == answer.stop_reason  # type: ignore[attr-defined]
    assert (set(answer.token_ids) == {300}) == ("logit_bias" in ours)


@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
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
    params = {"temperature": 1, "max_tokens": 8}
    answers = [expected(live, prompt, seed=seed, **params) for prompt in prompts for seed in (5, 6)]
    body = {"prompt": prompts, "max_tokens": 8, "n": 2, "seed": 5}
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
    """They are counted once for each prompt, as its tokens."""
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


def test_default_temperature_and_length_are_openais(live: Live) -> None:
    sampled = expected(live, temperature=1.0, seed=11)
    assert live.complete(prompt=PROMPT, max_tokens=24, seed=11)["choices"][0]["text"] == sampled.text
    assert sampled.text != expected(live).text
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


def test_the_other_paths(live: Live) -> None:
    (model,) = live.openai().models.list().data
    assert model.id == MODEL
    assert live.openai().models.retrieve(MODEL) == model
    for name in ("other", "a/b", f"{MODEL}/"):
        with pytest.raises(openai.NotFoundError, match=f"model: .* is not served here, only {MODEL}"):
            live.openai().models.retrieve(name)
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/version").json()["version"]
    messages = [{"role": "user", "content": "x"}]
    assert live.post("/tokenize", messages=messages).json()["tokens"] == encode_chat(live.llm.get_tokenizer(), messages)
    for path, kind in (("/", "text/html"), ("/page/page.css", "text/css"), ("/page/page.js", "text/javascript")):
        response = live.http.get(path)
        assert (response.status_code, response.headers["content-type"].split(";")[0]) == (200, kind)
