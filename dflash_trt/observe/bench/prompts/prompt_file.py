# SPDX-License-Identifier: Apache-2.0
"""Prompts of a JSON lines file: ours, an OpenAI batch, ShareGPT, MT-Bench's questions or a Mooncake trace."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.observe.bench.prompts.conversation import Conversation, Turn, user_turns

HINT = (
    'each line is {"prompt": "..."}, {"turns": ["...", "..."]} or {"messages": [{"role": ..., "content": ...}]}, or'
    " one of an OpenAI batch, of ShareGPT (jq -c '.[]' file.json) or of a Mooncake trace with text_input or messages"
)
HUMAN = ("human", "user")
"""Speakers of ShareGPT's that ask; the others' turns are the model's, which the run asks for again."""


class _PromptMessage(Turn, frozen=True, forbid_unknown_fields=True):
    pass


class _BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request in an OpenAI batch; its other fields are this run's to set."""

    prompt: str | None = None
    messages: tuple[_PromptMessage, ...] | None = None


class _Said(msgspec.Struct, frozen=True, rename={"speaker": "from"}):
    speaker: str
    value: str


class _PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of ours, of an OpenAI batch, of ShareGPT, of MT-Bench or of a Mooncake trace, by AIPerf's names."""

    id: str | None = None
    prompt: str | None = None
    turns: tuple[str, ...] | None = None
    messages: tuple[_PromptMessage, ...] | None = None
    category: str | None = None
    question_id: int | str | None = None
    reference: tuple[str, ...] | None = None
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

    @property
    def asked(self) -> list[str]:
        """Texts of ShareGPT's human."""
        return [said.value for said in self.conversations or () if said.speaker in HUMAN]

    @property
    def name(self) -> str | None:
        return self.id or self.custom_id or (None if self.question_id is None else str(self.question_id))

    def ways(self) -> list[tuple[Turn, ...]]:
        """The prompt, once for each field that holds one."""
        body = self.body or _BatchBody()
        single = [user_turns(text) for text in (self.prompt, self.text_input, body.prompt) if text is not None]
        several = [] if self.turns is None else [user_turns(*self.turns)]
        if self.conversations is not None:
            several.append(user_turns(*self.asked))
        messages = [many for many in (self.messages, body.messages) if many is not None]
        return [*single, *several, *(tuple(Turn(m.role, m.content) for m in many) for many in messages)]


def read_prompt_file(file: Path) -> Iterable[Conversation | None]:
    """The prompts; None for a conversation of ShareGPT in which no human speaks, or without words."""
    lines = read_json_lines(file, _PromptLine, ConfigError, what="a prompt", hint=HINT, may_be_pipe=True)
    for index, (where, line) in enumerate(lines):
        ways = line.ways()
        if not ways and line.input_length is not None:
            raise ConfigError(
                f"{where}: expected a prompt's text, found its length alone, for which a text would have to be made up",
                hint="measure with prompts of your own, or with SPEED-Bench's throughput splits of that length",
            )
        if line.conversations is not None and len(ways) == 1 and not all(line.asked or [""]):
            yield None
            continue
        if len(ways) != 1:
            raise ConfigError(f"{where}: expected one of prompt, turns and messages", hint=HINT)
        yield Conversation(
            id=line.name or f"line{index + 1}", turns=ways[0], category=line.category,
            timestamp=msgspec.UNSET if line.timestamp is None else line.timestamp,
        )  # fmt: skip
