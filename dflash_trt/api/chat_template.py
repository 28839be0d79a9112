# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids: text and conversations, with or without the target's chat template."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.errors import RequestError, cut, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates: Qwen3, GLM and Nemotron; DeepSeek and Kimi."""


def is_prompt(given: object) -> bool:
    """Whether `given` is one prompt (a text, or token ids in a list, tuple or array), and not a list of prompts."""
    if isinstance(given, list | tuple):
        return bool(given) and not isinstance(given[0], str | bytes | list | tuple) and not hasattr(given[0], "__len__")
    return True


def prompt_token_ids(prompt: Any) -> list[Any]:
    """The token ids of a prompt in a list, a tuple or an array of one dimension; RequestError for anything else.

    `check_prompt` checks the ids themselves.
    """
    if hasattr(prompt, "__array__"):
        import numpy as np

        prompt = prompt.tolist() if hasattr(prompt, "tolist") else np.asarray(prompt).tolist()
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"prompt: expected a text or a list of token ids, found {shown(prompt)}")
    return list(prompt)


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How text is wrapped in the target's chat template."""

    variables: dict[str, Any] = {}
    """Variables of the template, such as reasoning_effort."""
    no_thinking: bool = False
    """Whether the template's switch for thinking is turned off."""

    def encode(self, tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
        """Token ids of a conversation; raises what `render_chat` and `no_thinking` raise."""
        off = no_thinking(tokenizer) if self.no_thinking else {}
        return encode_chat(tokenizer, messages, template_kwargs=off | self.variables)


def no_thinking(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The variable that turns thinking off: the one whose value changes a rendered conversation.

    Raises RequestError where the template has neither of THINKING_SWITCHES.
    """
    for switch in THINKING_SWITCHES:
        on, off = (
            render_chat(tokenizer, [{"role": "user", "content": "x"}], template_kwargs={switch: value})
            for value in (True, False)
        )
        if on != off:
            return {switch: False}
    raise RequestError(
        "--no-thinking: the target's chat template has no switch that turns thinking off",
        hint='gpt-oss has efforts: --chat-template-kwargs \'{"reasoning_effort": "low"}\'',
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str, template: TemplateOptions | None = None) -> list[int]:
    """Token ids of `text` as it is, or with a `template` as the user's message; RequestError for surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8 arrive as lone surrogates
        raise RequestError(f"prompt: expected Unicode text, found {text[error.start]!r} at {error.start}") from None
    if template is not None:
        return template.encode(tokenizer, [{"role": "user", "content": text}])
    return list(tokenizer(text)["input_ids"])


def check_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises RequestError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise RequestError(
            "chat: expected a tokenizer with a chat template, found none", hint="give the prompt as plain text"
        )


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: object, **variables: Any) -> list[int]:
    """Token ids of a conversation in the chat template; takes and raises what `render_chat` does."""
    return list(tokenizer(render_chat(tokenizer, messages, **variables), add_special_tokens=False)["input_ids"])


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: object,
    *,
    tools: Sequence[dict[str, Any]] | None = (),
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """A conversation [{"role": ..., "content": ...}, ...] in the chat template, ready for the assistant's answer.

    `tools` are functions that the model may call, `template_kwargs` other variables of the template; `chat_template`
    replaces the tokenizer's. `continue_final_message` leaves the last message open.

    Raises RequestError for an invalid conversation, and where there is no template or it fails.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(f"messages: expected a list of messages, found {messages!r}")
    messages = [join_parts(message) for message in messages]
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f'messages: expected {{"role": text, "content": text}}, found {shown(message)}')
    if chat_template is None:
        check_chat(tokenizer)
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message: expected False, found True", hint="give add_generation_prompt=False with it"
        )
    variables = dict(template_kwargs or {})
    if reserved := sorted(variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()):
        raise RequestError(f"chat_template_kwargs: expected variables of the template, found {reserved[0]}")
    if tools:
        variables["tools"] = list(tools)
    variables |= {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    try:
        return _render(tokenizer, messages, variables)
    except RequestError:
        raise
    except Exception as error:  # a template is a program: any type, by any input
        index = _first_failing(tokenizer, messages, variables)
        problem = cut(f"{type(error).__name__}: {error}")
        raise RequestError(f"messages[{index}]: expected what the chat template takes, found: {problem}") from None


def join_parts(message: object) -> object:
    """Joins the text parts of a message to one text; RequestError for parts of another type."""
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            expected = 'content parts {"type": "text", "text": ...}, the only supported type'
            raise RequestError(f"messages: expected {expected}, found {shown(part)}")
    return message | {"content": "".join(part["text"] for part in parts)}


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[object], variables: dict[str, Any]) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **variables)
    text.encode()  # lone surrogates
    return str(text)


def _first_failing(tokenizer: PreTrainedTokenizerBase, messages: Sequence[object], variables: dict[str, Any]) -> int:
    """Index of the first message with which the template fails, by bisection."""

    def fails(length: int) -> bool:
        try:
            _render(tokenizer, messages[:length], variables)
        except RequestError:
            raise
        except Exception:
            return True
        return False

    return bisect_left(range(1, len(messages)), True, key=fails)
