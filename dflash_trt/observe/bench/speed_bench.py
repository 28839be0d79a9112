# SPDX-License-Identifier: Apache-2.0
"""A SPEED-Bench folder that its prepare_data.py has filled; NVIDIA's licence lets nobody else hand the texts on.

NVIDIA/Model-Optimizer's examples/specdec_bench/prepare_data.py writes DIR/speed/SPLIT/test.parquet (question_id,
category, turns); the data set's own script writes DIR/SPLIT.jsonl (question_id, category, messages).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_lines import read_json_lines
from dflash_trt.observe.bench.conversations import Conversation, PromptTurn
from dflash_trt.observe.bench.parquet_rows import read_parquet

SPLITS = ("qualitative", "throughput_1k", "throughput_2k", "throughput_8k", "throughput_16k", "throughput_32k")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # begins what is published in a text's place
HINT = "python prepare_data.py --dataset speed --config all, in examples/specdec_bench of NVIDIA/Model-Optimizer"


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _Row(msgspec.Struct, frozen=True):
    question_id: str
    category: str
    turns: tuple[str, ...] = ()
    messages: tuple[_Message, ...] = ()


def read_speed_bench(folder: Path, split: str) -> Iterator[Conversation]:
    """The prompts of one split; raises ConfigError where the folder has it not, or only its placeholders."""
    for where, row in _rows(folder, split):
        turns = tuple(PromptTurn("user", text) for text in row.turns)
        turns += tuple(PromptTurn(message.role, message.content) for message in row.messages)
        if any(turn.text.startswith(PLACEHOLDER) for turn in turns):
            raise ConfigError(f"{where}: expected the texts of SPEED-Bench, found a placeholder", hint=HINT)
        yield Conversation(id=row.question_id, turns=turns, category=row.category)


def _rows(folder: Path, split: str) -> Iterator[tuple[str, _Row]]:
    if split not in SPLITS:
        raise ConfigError(f"--split: expected one of {', '.join(SPLITS)}, found {split}")
    lines = folder / f"{split}.jsonl"
    if lines.is_file():
        yield from read_json_lines(lines, _Row, ConfigError, what="a row of SPEED-Bench", hint=HINT)
        return
    for file in (folder / "speed" / split / "test.parquet", folder / split / "test.parquet"):
        if file.is_file():
            yield from read_parquet(file, ("question_id", "category", "turns"), _Row, hint=HINT)
            return
    raise ConfigError(
        f"{folder}: expected {split}.jsonl or {split}/test.parquet of SPEED-Bench, found neither", hint=HINT
    )
