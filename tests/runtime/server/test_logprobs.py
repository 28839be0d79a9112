# SPDX-License-Identifier: Apache-2.0
"""Log probabilities, echo and logit_bias as clients get them: those of the runtime, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.server.openai_logprobs import TokenTexts
from tests.runtime.server.live import MODEL, Live

PROMPT = "def parse_args(argv):"
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
    assert expected.prompt_logprobs is not None
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
    assert whole is not None
    assert whole.content is not None
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


def test_each_token_is_decoded_once(live: Live) -> None:
    decoded: list[int] = []

    class Tokenizer:
        def decode(self, token_ids: list[int]) -> str:
            decoded.extend(token_ids)
            return f"<{token_ids}>"

    texts = TokenTexts(Tokenizer())  # type: ignore[arg-type]
    assert [texts[token] for token in (5, 6, 5)] == ["<[5]>", "<[6]>", "<[5]>"]
    assert decoded == [5, 6]
    live.endpoints._token_texts.clear()
    top = live.complete(prompt=PROMPT, max_tokens=2, temperature=0, logprobs=3)["choices"][0]["logprobs"][
        "top_logprobs"
    ]
    assert set(live.endpoints._token_texts.values()) == {text for each in top for text in each}


def test_logit_bias(live: Live) -> None:
    expected = live.llm.generate(PROMPT, SamplingParams(max_tokens=12, logit_bias={300: 100.0}))[0]
    answer = live.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logit_bias={"300": 100}
    )
    assert answer.choices[0].text == expected.text
    assert set(expected.token_ids) == {300}
