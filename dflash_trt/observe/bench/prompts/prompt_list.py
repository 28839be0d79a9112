# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: their source, the selection that is sent, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.prompts.conversation import Conversation
from dflash_trt.observe.bench.prompts.data_sets import HUB_SETS, read_hub_set, read_speed_bench
from dflash_trt.observe.bench.prompts.prompt_file import read_prompt_file
from dflash_trt.observe.bench.run_record import PromptSet


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptList:
    """Prompts in sending order."""

    name: str
    source: str
    prompts: tuple[Conversation, ...]
    num_skipped: int = 0
    """Conversations of the source that have nothing to send."""

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
    found = list(read_prompt_file(path))
    prompts = [prompt for prompt in found if prompt is not None]
    return PromptList(
        name=path.stem, source=name_or_path, prompts=_checked(name_or_path, prompts),
        num_skipped=len(found) - len(prompts),
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
        if not all(turn.content for turn in prompt.turns):
            raise ConfigError(f"{where}: prompt {prompt.id} has an empty turn")
        if prompt.id in ids:
            raise ConfigError(f"{where}: the id {prompt.id} occurs twice")
        ids.add(prompt.id)
    with_category = sum(prompt.category is not None for prompt in checked)
    if with_category not in (0, len(checked)):
        raise ConfigError(
            f"{where}: {with_category} of {len(checked)} prompts have a category; give all prompts one, or none"
        )
    return checked
