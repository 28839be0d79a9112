# SPDX-License-Identifier: Apache-2.0
"""Variables of chat templates, and the switch that turns thinking off in those that have one."""

from typing import Any

import pytest

from dflash_trt.api.chat_template import TemplateOptions, encode, no_thinking
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.errors import RequestError
from tests.paths import FIXTURES

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
QWEN = PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = PLAIN + "{% if not thinking %}</think>{% endif %}"
MENTIONS = PLAIN + "{# enable_thinking #}{% set thinking = 'thinking' %}{{ thinking }}"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(FIXTURES / "tiny-qwen3")


@pytest.mark.parametrize(("template", "switch"), [(QWEN, "enable_thinking"), (DEEPSEEK, "thinking")])
def test_the_switch_is_the_variable_that_changes_the_text(tokenizer: Any, template: str, switch: str) -> None:
    tokenizer.chat_template = template
    assert no_thinking(tokenizer) == {switch: False}
    off = tokenizer.decode(encode(tokenizer, "a", TemplateOptions(no_thinking=True)))
    assert off.endswith("</think>")
    both = TemplateOptions(no_thinking=True, variables={switch: True})
    assert tokenizer.decode(encode(tokenizer, "a", both)) == "a", "a variable that is given wins"


@pytest.mark.parametrize("template", [PLAIN, MENTIONS])
def test_a_template_without_a_switch(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match="has no switch that turns thinking off") as refused:
        encode(tokenizer, "a", TemplateOptions(no_thinking=True))
    assert "reasoning_effort" in str(refused.value.hint)


def test_variables_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN + "{{ reasoning_effort }}"
    options = TemplateOptions(variables={"reasoning_effort": "low"})
    assert tokenizer.decode(encode(tokenizer, "a ", options)) == "a low"
    with pytest.raises(RequestError, match="chat_template_kwargs: expected variables of the template, found tokenize"):
        encode(tokenizer, "a", TemplateOptions(variables={"tokenize": True}))
