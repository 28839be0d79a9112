# SPDX-License-Identifier: Apache-2.0
"""An answer does not end before `min_tokens`, in the texts that transformers' `min_new_tokens` decodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import Grammar, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from tests.engines import trained_engine
from tests.paths import FIXTURES

NAME = "tiny-qwen3"
CHAT = [{"role": "user", "content": "Sort a list in Python."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(trained_engine(NAME), FIXTURES / NAME) as opened:
        yield opened


@pytest.fixture(scope="module")
def ended(llm: LLM) -> list[int]:
    """Tokens of an answer that ends by itself, within the tokens asked for below."""
    answer = llm.chat([CHAT], SamplingParams(max_tokens=60))[0]
    assert answer.finish_reason is FinishReason.STOP
    return list(answer.token_ids)


def test_tokens_equal_transformers(llm: LLM, ended: list[int]) -> None:
    stop_ids = sorted(llm.backend.session.stop_ids)
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / NAME, dtype=torch.float32)
    prompt = llm.backend.encode_chat(CHAT)
    for least in (len(ended) - 1, len(ended), 60):
        answer = llm.generate([prompt], SamplingParams(max_tokens=60, min_tokens=least))[0]
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=60, min_new_tokens=least, do_sample=False,
            eos_token_id=stop_ids, pad_token_id=0,
        )  # fmt: skip
        assert answer.token_ids == output[0, len(prompt) :].tolist()
        assert len(answer.token_ids) >= least
        assert (answer.token_ids == ended) == (least < len(ended))
        assert answer.tau is not None
        assert answer.tau > 1  # drafts were verified


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stop_token_ids_wait_too(llm: LLM, temperature: float) -> None:
    settings = {"max_tokens": 40, "temperature": temperature, "seed": 1, "ignore_eos": True}
    free = llm.chat([CHAT], SamplingParams(**settings))[0]
    stop = free.token_ids[3]
    assert len(llm.chat([CHAT], SamplingParams(**settings, stop_token_ids=[stop]))[0].token_ids) <= 4
    answer = llm.chat([CHAT], SamplingParams(**settings, stop_token_ids=[stop], min_tokens=20))[0]
    assert len(answer.token_ids) > 20
    assert stop not in answer.token_ids[:20]


def test_a_stop_text_waits_too(llm: LLM, ended: list[int]) -> None:
    free = llm.chat([CHAT], SamplingParams(max_tokens=60))[0]
    stop = free.text[1:3]
    assert llm.chat([CHAT], SamplingParams(max_tokens=60, stop=stop))[0].text == free.text[:1]
    answer = llm.chat([CHAT], SamplingParams(max_tokens=60, stop=stop, min_tokens=len(ended) - 1))[0]
    assert answer.text.startswith(free.text[: free.text.index(stop) + 2])


def test_what_cannot_be(llm: LLM) -> None:
    with pytest.raises(RequestError, match="min_tokens: expected at most max_tokens, 8, found 9"):
        llm.chat([CHAT], SamplingParams(max_tokens=8, min_tokens=9))
    with pytest.raises(RequestError, match="min_tokens: expected 0 with structured_outputs"):
        SamplingParams(min_tokens=1, structured_outputs=Grammar(kind="regex", text="a"))
