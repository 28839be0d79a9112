# SPDX-License-Identifier: Apache-2.0
"""`return_steps`: what each pass proposed, accepted and emitted, with texts."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.api.sampling_params import SamplingParams
from tests.runtime.server.live import Live

PROMPT = "class Stack:\n    def push(self, x):"


def steps_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for part in parts for choice in part["choices"] for step in choice["steps"]]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_steps_are_the_decoders(live: Live, settings: dict[str, Any], stream: bool) -> None:
    answer = live.llm.generate(PROMPT, SamplingParams(max_tokens=60, **settings))[0]
    body = {"prompt": PROMPT, "max_tokens": 60, "return_steps": True, **settings}
    steps = steps_of(live.events(**body) if stream else [live.complete(**body)])
    assert steps[0] == {"is_prefill": True, "proposals": [], "num_accepted": 0, "tokens": steps[0]["tokens"]}
    passes = steps[1:]
    assert not any(step["is_prefill"] for step in passes)
    assert [token["id"] for step in steps for token in step["tokens"]] == answer.token_ids
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == answer.text
    assert answer.acceptance is not None
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
    from dflash_trt.api.acceptance import Step
    from dflash_trt.api.backend import Chunk
    from dflash_trt.runtime.server.step_texts import StepTexts

    texts = StepTexts(live.llm.backend.tokenizer)
    step = Step(token_ids=ids[1:], proposals=[*ids[1:-1], ids[0]], accepted=len(ids) - 2)
    read = texts.read(Chunk(text="", token_ids=ids, steps=[step], completion=None))
    assert "".join(token["text"] for part in read for token in part["tokens"]) == "x = 'é世🙂'"
    assert any(token["text"] == "" for part in read for token in part["tokens"])


@pytest.mark.parametrize("length", range(8))
def test_draft_length_caps_the_proposals(live: Live, length: int) -> None:
    plain = live.complete(prompt=PROMPT, max_tokens=20, temperature=0)
    given = live.complete(prompt=PROMPT, max_tokens=20, temperature=0, draft_length=length, return_steps=True)
    assert given["choices"][0]["text"] == plain["choices"][0]["text"]
    assert max(len(step["proposals"]) for step in steps_of([given])) == length


def test_nobody_who_does_not_ask_gets_them(live: Live) -> None:
    assert "steps" not in live.complete(prompt=PROMPT, max_tokens=4)["choices"][0]
