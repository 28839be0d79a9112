# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: their sources, the selection that is sent, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.observe.bench.data_sets import (
    HUB_SETS,
    Conversation,
    Message,
    PromptTurn,
    prompt_turns,
    read_hub_set,
    read_speed_bench,
)
from dflash_trt.observe.bench.records import PromptSet

HINT = (
    'each line is {"prompt": "..."}, {"turns": ["...", "..."]} or {"messages": [{"role": ..., "content": ...}]}, or'
    " one of an OpenAI batch, of ShareGPT (jq -c '.[]' file.json) or of a Mooncake trace with text_input or messages"
)
HUMAN = ("human", "user")
"""Speakers of ShareGPT's that ask; the others' turns are the model's, which the run asks for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptList:
    """Prompts in sending order."""

    name: str
    source: str
    prompts: tuple[Conversation, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories in order; empty if the prompts have none."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts if prompt.category is not None))

    def only(self, categories: Sequence[str]) -> PromptList:
        """The prompts of some categories; raises ConfigError for a category without prompts."""
        if missing := [name for name in categories if name not in self.categories]:
            names = ", ".join(self.categories) or "none"
            raise ConfigError(f"--category: expected one of {names}, found {', '.join(missing)}")
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.category in categories))

    def of(self, category: str | None) -> tuple[Conversation, ...]:
        """Prompts of a category, which a point sends; None: all."""
        return tuple(prompt for prompt in self.prompts if category in (None, prompt.category))

    def exactly(self, number: int) -> PromptList:
        """The first `number` of each category; fewer are repeated under new names."""
        prompts: list[Conversation] = []
        for category in self.categories or (None,):
            matching = self.of(category)
            rounds = islice(cycle(matching), number)
            prompts += (
                msgspec.structs.replace(prompt, id=prompt.id if index < len(matching) else f"{prompt.id}.{index}")
                for index, prompt in enumerate(rounds)
            )
        return replace(self, prompts=tuple(prompts))

    def record(self, *, is_pooled: bool) -> PromptSet:
        """For run.json."""
        return PromptSet(
            name=self.name,
            source=self.source,
            sha256=hashlib.sha256(msgspec.json.encode(self.prompts)).hexdigest(),
            num_prompts=len(self.prompts),
            categories=() if is_pooled else self.categories,
        )


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


def read_prompt_list(name_or_path: str, *, split: str | None = None) -> PromptList:
    """A hub data set, a SPEED-Bench folder or a file of ours; raises ConfigError for anything else."""
    path = Path(name_or_path)
    if name_or_path in HUB_SETS and not path.exists():
        source, prompts = read_hub_set(name_or_path)
        return PromptList(name=name_or_path, source=source, prompts=_checked(name_or_path, prompts))
    if path.is_dir():
        split = split or "qualitative"
        return PromptList(
            name=f"speed-bench-{split}",
            source=name_or_path,
            prompts=_checked(name_or_path, read_speed_bench(path, split)),
        )
    if split is not None:
        raise ConfigError(f"--split: expected --prompts to be a SPEED-Bench folder, found {name_or_path}")
    if not path.exists():
        names = ", ".join(HUB_SETS)
        raise ConfigError(f"--prompts: expected a file, a SPEED-Bench folder or one of {names}, found {name_or_path}")
    return PromptList(name=path.stem, source=name_or_path, prompts=_checked(name_or_path, _read_file(path)))


def _read_file(file: Path) -> Iterable[Conversation]:
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


def _checked(where: str, prompts: Iterable[Conversation]) -> tuple[Conversation, ...]:
    checked = tuple(prompts)
    if not checked:
        raise ConfigError(f"{where}: no prompts")
    ids: set[str] = set()
    for prompt in checked:
        roles = [turn.role for turn in prompt.turns]
        users = roles[1:] if roles[:1] == ["system"] else roles
        if not users or set(users) != {"user"}:
            raise ConfigError(
                f"{where}: {prompt.id}: expected user turns, optionally after a system prompt, found {roles}",
                hint="leave out the model's answers: the run asks for them again",
            )
        if not all(turn.text for turn in prompt.turns):
            raise ConfigError(f"{where}: {prompt.id}: expected a text in each turn, found an empty one")
        if prompt.id in ids:
            raise ConfigError(f"{where}: expected each id once, found {prompt.id} twice")
        ids.add(prompt.id)
    with_category = sum(prompt.category is not None for prompt in checked)
    if with_category not in (0, len(checked)):
        raise ConfigError(
            f"{where}: expected a category for all prompts or for none, found {with_category} of {len(checked)}"
        )
    return checked
