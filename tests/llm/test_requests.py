# SPDX-License-Identifier: Apache-2.0
"""Requests in the forms that vLLM takes: prompts, several answers, conversations, progress bars."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt import llm as api
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from tests.llm.serving import PROMPTS, greedy, within

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
    real = api.progress_bar
    monkeypatch.setattr(api, "progress_bar", lambda total, label: shown.append(total) or real(total, label))
    monkeypatch.setattr(api.sys.stderr, "isatty", lambda: True, raising=False)
    within(lambda: llm.generate(PROMPTS, greedy(2), use_tqdm=is_asked))
    within(lambda: llm.generate(PROMPTS[0], greedy(2), use_tqdm=is_asked))
    assert shown == [len(PROMPTS)] * is_asked
