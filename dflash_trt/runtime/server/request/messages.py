# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat, as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from dflash_trt.api.chat_template import join_parts
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.calls.deepseek import DeepSeekFormat
from dflash_trt.runtime.server.request.body import decode_object

MAX_ARGUMENT_CHARACTERS = 2**21
"""Characters of all tool calls of a conversation, which are JSON in JSON."""


def read_messages(given: Sequence[dict[str, Any]], form: object = None) -> list[dict[str, Any]]:
    """Joins the text parts of messages, and decodes the arguments of their calls; RequestError for other parts.

    `form` is the template's format of calls; some take the arguments as text.
    """
    messages = []
    is_text = isinstance(form, DeepSeekFormat) and form.has_text_arguments
    num_characters = 0
    for message in given:
        message = cast("dict[str, Any]", join_parts(message))
        if isinstance(calls := message.get("tool_calls"), list):
            num_characters += sum(map(_argument_characters, calls))
            if num_characters > MAX_ARGUMENT_CHARACTERS:
                raise RequestError(f"messages: arguments have more than {MAX_ARGUMENT_CHARACTERS} characters")
            message = message | {"tool_calls": [_tool_call(call, is_text=is_text) for call in calls]}
            message["content"] = message.get("content") or ""
        messages.append(message)
    return messages


def _argument_characters(call: object) -> int:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return len(arguments) if isinstance(arguments, str) else 0


def _tool_call(call: object, *, is_text: bool) -> object:
    """A call with its arguments as an object, which is what most templates expect, or as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call  # left to the template
    arguments = given = function.get("arguments")
    if isinstance(given, str):
        given = given or "{}"
        arguments = decode_object(given, "messages[].tool_calls[].function.arguments")
    if is_text:
        arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    return call | {"function": function | {"arguments": arguments}}
