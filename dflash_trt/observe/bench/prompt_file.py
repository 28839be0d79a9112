# SPDX-License-Identifier: Apache-2.0
"""Prompts of a JSON lines file: ours, an OpenAI batch, ShareGPT or a Mooncake trace."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.observe.bench.conversation import Conversation, Message, PromptTurn, prompt_turns

HINT = (
    'each line is {"prompt": "..."}, {"turns": ["...", "..."]} or {"messages": [{"role": ..., "content": ...}]}, or'
    " one of an OpenAI batch, of ShareGPT (jq -c '.[]' file.json) or of a Mooncake trace with text_input or messages"
)
HUMAN = ("human", "user")
"""Speakers of ShareGPT's that ask; the others' turns are the model's, which the run asks for again."""


class _PromptMessage(Message, frozen=True, forbid_unknown_fields=True):
    pass


class _BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request in an OpenAI batch; its other fields are this run's to set."""

    prompt: str | None = None
    messages: tuple[_PromptMessage, ...] | None = None


class _Said(msgspec.Struct, frozen=True, rename={"speaker": "from"}):
    speaker: str
    value: str


class _PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of ours, of an OpenAI batch, of ShareGPT or of a Mooncake trace, by AIPerf's names."""

    id: str | None = None
    prompt: str | None = None
    turns: tuple[str, ...] | None = None
    messages: tuple[_PromptMessage, ...] | None = None
    category: str | None = None
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: _BatchBody | None = None
    conversations: tuple[_Said, ...] | None = None
    text_input: str | None = None
    timestamp: float | None = None
    session_id: str | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: tuple[int, ...] | None = None

    def ways(self) -> list[tuple[PromptTurn, ...]]:
        """What each of its fields asks."""
        body = self.body or _BatchBody()
        asked = tuple(said.value for said in self.conversations or () if said.speaker in HUMAN)
        single = (self.prompt, self.text_input, body.prompt)
        texts: list[tuple[str, ...]] = [(text,) for text in single if text is not None]
        texts += [] if self.turns is None else [self.turns]
        texts += [] if self.conversations is None else [asked]
        messages = [many for many in (self.messages, body.messages) if many is not None]
        return [*map(prompt_turns, texts), *(prompt_turns((), many) for many in messages)]


def read_prompt_file(file: Path) -> Iterable[Conversation]:
    lines = read_json_lines(file, _PromptLine, ConfigError, what="a prompt", hint=HINT, may_be_pipe=True)
    for index, (where, line) in enumerate(lines):
        ways = line.ways()
        if not ways and line.input_length is not None:
            raise ConfigError(
                f"{where}: expected a prompt's text, found its length alone, for which a text would have to be made up",
                hint="measure with prompts of your own, or with SPEED-Bench's throughput splits of that length",
            )
        if len(ways) != 1:
            raise ConfigError(f"{where}: expected one of prompt, turns and messages", hint=HINT)
        yield Conversation(
            id=line.id or line.custom_id or f"line{index + 1}", turns=ways[0], category=line.category,
            timestamp=msgspec.UNSET if line.timestamp is None else line.timestamp,
        )  # fmt: skip
