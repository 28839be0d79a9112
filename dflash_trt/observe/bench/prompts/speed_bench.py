# SPDX-License-Identifier: Apache-2.0
"""SPEED-Bench's prompts from a folder that the user prepared; its licence forbids redistributing them.

NVIDIA/Model-Optimizer's examples/specdec_bench/prepare_data.py writes DIR/speed/SPLIT/test.parquet (question_id,
category, turns); the data set's own script writes DIR/SPLIT.jsonl (question_id, category, messages).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.observe.bench.prompts.conversation import Conversation, Turn, user_turns
from dflash_trt.observe.bench.prompts.parquet_rows import read_parquet

SPLITS = ("qualitative", "throughput_1k", "throughput_2k", "throughput_8k", "throughput_16k", "throughput_32k")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # start of the text that is published in place of a prompt
HINT = "python prepare_data.py --dataset speed --config all, in examples/specdec_bench of NVIDIA/Model-Optimizer"


class _SpeedBenchRow(msgspec.Struct, frozen=True):
    question_id: str
    category: str
    turns: tuple[str, ...] = ()
    messages: tuple[Turn, ...] = ()


def read_speed_bench(folder: Path, split: str) -> Iterator[Conversation]:
    """The prompts of one split; raises ConfigError if the folder lacks it or has only placeholders."""
    for where, row in _rows(folder, split):
        turns = (*user_turns(*row.turns), *row.messages)
        if any(turn.content.startswith(PLACEHOLDER) for turn in turns):
            raise ConfigError(f"{where}: expected the texts of SPEED-Bench, found a placeholder", hint=HINT)
        yield Conversation(id=row.question_id, turns=turns, category=row.category)


def _rows(folder: Path, split: str) -> Iterator[tuple[str, _SpeedBenchRow]]:
    if split not in SPLITS:
        raise ConfigError(f"--split: expected one of {', '.join(SPLITS)}, found {split}")
    lines = folder / f"{split}.jsonl"
    if lines.is_file():
        yield from read_json_lines(lines, _SpeedBenchRow, ConfigError, what="a row of SPEED-Bench", hint=HINT)
        return
    for file in (folder / "speed" / split / "test.parquet", folder / split / "test.parquet"):
        if file.is_file():
            yield from read_parquet(file, ("question_id", "category", "turns"), _SpeedBenchRow, hint=HINT)
            return
    raise ConfigError(f"{folder} has neither SPEED-Bench's {split}.jsonl nor {split}/test.parquet", hint=HINT)
