# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the format of DeepSeek's chat templates: a section of calls at the end of an answer.

V3.1, V3.1-Terminus and V3.2-Exp:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>

V3-0324 and R1-0528, several calls on lines of their own:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

As in SGLang 0.5.23, function_call/deepseekv31_detector.py and deepseekv3_detector.py. V3.2 and V4 write DSML instead,
and have no chat templates.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dflash_trt.api.chat_template import render_chat
from dflash_trt.errors import RequestError
from dflash_trt.runtime.grammars.structural_tags import PLACE
from dflash_trt.runtime.server.calls.hermes import CUT, CallDelta, CallTags, is_cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
"""Around all calls."""
TAGS = CallTags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", (BEGIN, END))
SEPARATOR = "<｜tool▁sep｜>"
PLAIN = re.compile(rf"\s*([\w-]+)\s*{SEPARATOR}")
FENCED = re.compile(rf"\s*function\s*{SEPARATOR}\s*([\w-]+)\s*```json\s")
"""A call up to its arguments."""


class DeepSeekFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a chat template writes calls, and takes those of a conversation."""

    is_fenced: bool
    """Whether a call has a type, and its arguments a Markdown fence."""
    has_text_arguments: bool
    """Whether the template takes arguments as text, and not as an object."""

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase) -> DeepSeekFormat | None:
        """Reads the format from a rendered conversation; None for a template that writes another."""
        for has_text_arguments in (True, False):
            arguments: object = "{}" if has_text_arguments else {}
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                text = render_chat(tokenizer, messages, add_generation_prompt=False)
            except RequestError:  # the template takes the other kind
                continue
            for is_fenced in (False, True):
                form = cls(is_fenced=is_fenced, has_text_arguments=has_text_arguments)
                if f"{BEGIN}{form.begin('f')}{{}}{form.end}" in text:
                    return form
        return None

    @property
    def separator(self) -> str:
        """Between two calls."""
        return "\n" if self.is_fenced else ""

    @property
    def end(self) -> str:
        """After the arguments of a call."""
        return f"\n```{TAGS.end}" if self.is_fenced else TAGS.end

    def begin(self, name: str) -> str:
        """A call up to its arguments."""
        inner = f"function{SEPARATOR}{name}\n```json\n" if self.is_fenced else f"{name}{SEPARATOR}"
        return f"{TAGS.begin}{inner}"

    def read_call(self, text: str) -> CallDelta | Literal["cut"] | None:
        """Reads the text between the tags of a call; None for text that is no call."""
        if (begin := (FENCED if self.is_fenced else PLAIN).match(text)) is None:
            return None
        arguments = text[begin.end() :].strip()
        if self.is_fenced and arguments.endswith("```"):
            arguments = arguments.removesuffix("```").rstrip()
        elif self.is_fenced:
            return CUT if is_cut(arguments) else None
        try:
            msgspec.json.decode(arguments, type=dict)
        except (msgspec.DecodeError, RecursionError):
            return CUT if is_cut(arguments) else None
        return CallDelta(begin[1], arguments)

    def grammar(self, schemas: dict[str, Json], *, required: bool, parallel: bool) -> Json:
        """Structural tag of an answer whose calls match the schemas of arguments, given by names of functions."""
        calls = [
            {
                "type": "tag",
                "begin": self.begin(name),
                "content": {"type": "json_schema", "json_schema": schema, PLACE: f"parameters of {name}"},
                "end": self.end,
            }
            for name, schema in schemas.items()
        ]
        content: Json = {"type": "tags_with_separator", "separator": self.separator, "tags": calls}
        content |= {"at_least_one": True, "stop_after_first": not parallel}
        section: Json = {"type": "tag", "begin": BEGIN, "content": content, "end": END}
        if required:
            return section
        excludes = [TAGS.begin]  # the parser takes a call without the section too
        return {
            "type": "triggered_tags", "triggers": [BEGIN], "tags": [section], "excludes": excludes,
            "stop_after_first": True,
        }  # fmt: skip
