# SPDX-License-Identifier: Apache-2.0
"""Whole answers, where they end and what they cost; prompts and options in the forms that vLLM takes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import llm as api
from dflash_trt.api.chat_template import encode_chat
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import Grammar, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.progress_display import progress_bar
from tests.decoding import text_of
from tests.llm.serving import PROMPTS, greedy, open_llm, within
from tests.oracle.transformers_dflash import load_target
from tests.paths import FIXTURES
from tests.waiting import PATIENCE

USER = [{"role": "user", "content": "def f("}]


def test_prompts_in_dictionaries(llm: LLM) -> None:
    (plain,) = within(lambda: llm.generate(PROMPTS[0], greedy(4)))
    assert [each.text for each in plain.outputs] == [plain.text]
    given = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": [5, 6], "prompt": "text"}]
    text, ids = within(lambda: llm.generate(given, greedy(4)))
    assert (text.token_ids, text.prompt, ids.prompt) == (plain.token_ids, PROMPTS[0], [5, 6])
    assert text.prompt_token_ids == llm.get_tokenizer()(PROMPTS[0])["input_ids"]
    assert ids.prompt_token_ids == [5, 6]


def test_several_answers_to_a_prompt(llm: LLM) -> None:
    drawn = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    both = within(lambda: llm.generate([PROMPTS[0], PROMPTS[1]], SamplingParams(n=3, **drawn)))
    assert [[each.index for each in answer.outputs] for answer in both] == [[0, 1, 2]] * 2
    for index, answer in enumerate(both[1].outputs):
        alone = within(lambda i=index: llm.generate(PROMPTS[1], SamplingParams(**drawn | {"seed": 3 + i}))[0])
        assert (answer.token_ids, answer.prompt) == (alone.token_ids, PROMPTS[1])
    with pytest.raises(RequestError, match="n: expected 1 in a stream, found 2"):
        next(llm.stream(PROMPTS[0], SamplingParams(n=2)))


def test_numbers_of_log_probabilities(llm: LLM) -> None:
    assert SamplingParams(logprobs=0) == SamplingParams(logprobs=True)
    assert SamplingParams(prompt_logprobs=3) == SamplingParams(prompt_logprobs=True, top_logprobs=3)
    answer = within(lambda: llm.generate(PROMPTS[0], greedy(2, logprobs=4))[0])
    assert [len(top) for top in answer.top_logprobs or []] == [4, 4]


def test_chat_templates(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{{ extra }}{% for t in tools or [] %}{{ t.name }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)

    def prompt(messages: Any = USER, **options: Any) -> str:
        answer = within(lambda: llm.chat(messages, greedy(1), **options)[0])
        return str(llm.get_tokenizer().decode(answer.prompt))

    assert prompt() == "<user>def f(<a>"
    assert prompt(
        [{"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f("}]}]
    ) == ("<user>def f(<a>")
    assert prompt(chat_template_kwargs={"extra": "!"}, tools=[{"name": "x"}]) == "<user>def f(!x<a>"
    assert prompt(add_generation_prompt=False) == "<user>def f("
    assert prompt(chat_template="{{ messages[0].content }}") == "def f("
    begun = [*USER, {"role": "assistant", "content": "x"}]
    assert prompt(begun, add_generation_prompt=False, continue_final_message=True) == "<user>def f(<assistant>x"
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        llm.chat(begun, continue_final_message=True)
    with pytest.raises(RequestError, match="content parts"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    assert len(within(lambda: llm.chat([USER, USER], greedy(1)))) == 2


class Bar:
    """A progress bar like tqdm's."""

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.count, self.is_closed = total, 0, False

    def update(self, by: int) -> None:
        self.count += by

    def close(self) -> None:
        self.is_closed = True


def test_a_bar_of_ones_own(llm: LLM) -> None:
    made: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        made.append(Bar(**arguments))
        return made[-1]

    within(lambda: llm.generate(PROMPTS, greedy(2), use_tqdm=make))
    assert [(bar.total, bar.count, bar.is_closed) for bar in made] == [(len(PROMPTS), len(PROMPTS), True)]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_bar_on_a_terminal(is_asked: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(api, "progress_bar", lambda total, label: shown.append(total) or progress_bar(total, label))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    within(lambda: llm.generate(PROMPTS, greedy(2), use_tqdm=is_asked))
    within(lambda: llm.generate(PROMPTS[0], greedy(2), use_tqdm=is_asked))
    assert shown == [len(PROMPTS)] * is_asked


def test_answers_come_in_the_prompts_order(llm: LLM) -> None:
    lengths = [30, 2, 17, 1, 9, 25, 3, 12]
    asked = [PROMPTS[i % 4] for i in range(8)]
    answers = within(lambda: llm.generate(prompts=asked, sampling_params=[greedy(n) for n in lengths]))
    alone = [within(lambda p=p, n=n: llm.generate(p, greedy(n))[0]) for p, n in zip(asked, lengths, strict=True)]
    assert [a.token_ids for a in answers] == [a.token_ids for a in alone]
    assert [len(a.token_ids) for a in answers] == lengths
    assert {a.finish_reason for a in answers} == {FinishReason.LENGTH}
    assert within(lambda: llm.generate([])) == []
    same = within(lambda: llm.generate(asked[:3], greedy(5)))
    assert [len(a.token_ids) for a in same] == [5, 5, 5]


def test_the_default_ends_at_the_targets_end_of_sequence(llm: LLM) -> None:
    full = within(lambda: llm.generate(PROMPTS[0], greedy(40))[0])
    eos = full.token_ids[11]
    stop_ids, llm.backend.session.stop_ids = llm.backend.session.stop_ids, frozenset([eos])
    try:
        answer = within(lambda: llm.generate(PROMPTS[0])[0])
        ignoring = within(lambda: llm.generate(PROMPTS[0], greedy(40))[0])
    finally:
        llm.backend.session.stop_ids = stop_ids
    assert answer.token_ids == full.token_ids[: full.token_ids.index(eos) + 1]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, None)
    assert ignoring.token_ids == full.token_ids


def test_stop_ids_and_texts_cut_exactly(llm: LLM) -> None:
    at = 8
    full = within(lambda: llm.generate(PROMPTS[2], greedy(32))[0])
    stop_id = full.token_ids[at]
    answer = within(lambda: llm.generate(PROMPTS[2], greedy(32, stop_token_ids=frozenset([stop_id])))[0])
    assert answer.token_ids == full.token_ids[: full.token_ids.index(stop_id) + 1]
    assert (answer.stop_reason, full.stop_reason) == (stop_id, None)
    assert answer.text == text_of(llm.backend.session, answer.token_ids)

    stop = full.text[2 * at : 2 * at + 5]
    answer = within(lambda: llm.generate(PROMPTS[2], greedy(32, stop=("never so", stop)))[0])
    assert answer.text == full.text[: full.text.index(stop)]
    assert answer.stop_reason == stop
    assert answer.finish_reason is FinishReason.STOP
    number = len(answer.token_ids)
    assert answer.token_ids == full.token_ids[:number]
    assert stop in text_of(llm.backend.session, full.token_ids[:number])
    assert stop not in text_of(llm.backend.session, full.token_ids[: number - 1])


def test_metrics_are_consistent(llm: LLM) -> None:
    before = llm.metrics()
    answers = within(lambda: llm.generate([*PROMPTS, *PROMPTS], greedy(30)))
    for answer in answers:
        assert answer.tau == pytest.approx((len(answer.token_ids) - 1) / answer.steps)
        found = answer.acceptance
        assert found.emitted == len(answer.token_ids) - 1
        assert found.accepted == sum(found.accepted_by_position) == found.emitted - found.passes
        assert list(found.accepted_by_position) == sorted(found.accepted_by_position, reverse=True)
        assert len(found.accepted_by_position) <= 7
        assert found.accepted <= found.proposed <= 7 * found.passes
        assert answer.ttft_seconds is not None
        assert answer.itl_seconds is not None
        assert 0 <= answer.queue_seconds <= answer.ttft_seconds <= answer.seconds
        assert answer.itl_seconds * 29 + answer.ttft_seconds <= answer.seconds + 1e-9
    assert max(a.queue_seconds for a in answers[4:]) > max(a.queue_seconds for a in answers[:4]), "four slots"
    after = llm.metrics()
    assert after.acceptance == sum((a.acceptance for a in answers), before.acceptance)
    assert after.output_tokens - before.output_tokens == 8 * 30
    one = within(lambda: llm.generate(PROMPTS[0], greedy(1))[0])
    assert (one.steps, one.tau, one.itl_seconds, one.acceptance.proposed) == (0, None, None, 0)


def test_prompts_that_cannot_be_served_are_refused(llm: LLM) -> None:
    empties: tuple[Any, ...] = ("", [[]], ())
    for empty in empties:
        with pytest.raises(RequestError, match="expected at least one token, found an empty prompt"):
            list(llm.stream(empty)) if empty == () else llm.generate(empty)
    with pytest.raises(RequestError, match=r"expected at most 8192 tokens .* 8190 in the prompt \+ 3 new ones"):
        llm.generate([5] * 8190, greedy(3))
    with pytest.raises(RequestError, match="expected token ids from 0 to 1023, found 1024"):
        llm.stream([3, 1024])
    with pytest.raises(RequestError, match="sampling_params: expected one for each of 2 prompts, found 1"):
        llm.generate(PROMPTS[:2], [greedy(3)])
    with pytest.raises(RequestError, match="found an empty prompt"):
        llm.generate([PROMPTS[0], []], greedy(3))
    assert llm.metrics().running == llm.metrics().waiting == 0


@pytest.mark.parametrize("token", [1.5, None, True, 1024])
def test_token_ids_that_are_no_integers_do_not_reach_the_decoder(llm: LLM, token: Any) -> None:
    """There they would end it for all requests."""
    with pytest.raises(RequestError, match=f"expected token ids from 0 to 1023, found {token!r}"):
        llm.generate([5, token], greedy(3))
    answer, same = within(lambda: llm.generate([[5, 6], list(np.array([5, 6]))], greedy(3)))
    assert answer.token_ids == same.token_ids


def test_a_request_beyond_the_caches_is_refused(engine: Path) -> None:
    with open_llm(engine, cache_gib=0.002) as llm:
        room = llm.metrics().free_cache_tokens
        with pytest.raises(
            RequestError, match=f"expected at most {room} tokens, which is what 0.002 GiB of cache hold"
        ):
            llm.generate([5] * room, greedy(1))
        assert len(within(lambda: llm.generate([5] * (room - 2), greedy(2))[0]).token_ids) == 2


def test_many_threads_at_once(llm: LLM) -> None:
    """Each gets its own answer."""
    lengths = [1 + (7 * i) % 23 for i in range(32)]
    expected = {p: within(lambda p=p: llm.generate(p, greedy(24))[0]).token_ids for p in PROMPTS}
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(llm.generate, PROMPTS[i % 4], greedy(n)) for i, n in enumerate(lengths)]
        answers = [future.result(PATIENCE)[0] for future in futures]
    for i, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
        assert answer.token_ids == expected[PROMPTS[i % 4]][:length]


CHAT = [{"role": "user", "content": "Sort a list in Python."}]


@pytest.fixture
def ended(llm: LLM) -> list[int]:
    """Tokens of an answer that ends by itself, within the tokens asked for below."""
    answer = within(lambda: llm.chat([CHAT], SamplingParams(max_tokens=60))[0])
    assert answer.finish_reason is FinishReason.STOP
    return list(answer.token_ids)


def test_min_tokens_are_transformers_min_new_tokens(llm: LLM, ended: list[int]) -> None:
    stop_ids = sorted(llm.backend.session.stop_ids)
    model, prompt = load_target(FIXTURES / "tiny-qwen3"), encode_chat(llm.get_tokenizer(), CHAT)
    for least in (len(ended) - 1, len(ended), 60):
        params = SamplingParams(max_tokens=60, min_tokens=least, draft_length=7)
        answer = within(lambda params=params: llm.generate([prompt], params)[0])
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=60, min_new_tokens=least, do_sample=False,
            eos_token_id=stop_ids, pad_token_id=0,
        )  # fmt: skip
        assert answer.token_ids == output[0, len(prompt) :].tolist()
        assert (answer.token_ids == ended) == (least < len(ended))
        assert answer.acceptance.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stop_token_ids_wait_for_min_tokens(llm: LLM, temperature: float) -> None:
    settings = {"max_tokens": 40, "temperature": temperature, "seed": 1, "ignore_eos": True}
    stop = within(lambda: llm.chat([CHAT], SamplingParams(**settings))[0]).token_ids[3]
    early, late = (SamplingParams(**settings, stop_token_ids=[stop], min_tokens=least) for least in (0, 20))
    assert len(within(lambda: llm.chat([CHAT], early)[0]).token_ids) <= 4
    answer = within(lambda: llm.chat([CHAT], late)[0])
    assert len(answer.token_ids) > 20
    assert stop not in answer.token_ids[:20]


def test_a_stop_text_waits_for_min_tokens(llm: LLM, ended: list[int]) -> None:
    free = text_of(llm.backend.session, ended)
    stop = free[1:3]
    cut, whole = (SamplingParams(max_tokens=60, stop=stop, min_tokens=least) for least in (0, len(ended) - 1))
    assert within(lambda: llm.chat([CHAT], cut)[0]).text == free[:1]
    answer = within(lambda: llm.chat([CHAT], whole)[0])
    assert answer.text.startswith(free[: free.index(stop) + 2])


def test_min_tokens_that_cannot_be(llm: LLM) -> None:
    with pytest.raises(RequestError, match="min_tokens: expected at most max_tokens, 8, found 9"):
        llm.chat([CHAT], SamplingParams(max_tokens=8, min_tokens=9))
    with pytest.raises(RequestError, match="min_tokens: expected 0 with structured_outputs"):
        SamplingParams(min_tokens=1, structured_outputs=Grammar(kind="regex", text="a"))
