# SPDX-License-Identifier: Apache-2.0
"""Data sets that DFlash is published with, from the hub, and SPEED-Bench, from a folder.

Files, splits and templates of the hub's are those of dflash/benchmark.py in z-lab/dflash; for AIME25 and LiveCodeBench
of its predecessor, model/utils.py. Files are read as data; no code of a repository is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.files.read import open_file
from dflash_trt.observe.bench.prompts.conversation import Conversation, Turn, user_turns

MAX_ROWS = 100_000
T = TypeVar("T")
Fields = Mapping[str, object]
REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SPLITS = ("qualitative", "throughput_1k", "throughput_2k", "throughput_8k", "throughput_16k", "throughput_32k")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # start of the text that is published in place of a prompt
HINT = "python prepare_data.py --dataset speed --config all, in examples/specdec_bench of NVIDIA/Model-Optimizer"


def read_parquet(
    file: Path, columns: Sequence[str], kind: type[T], *, hint: str | None = None
) -> Iterator[tuple[str, T]]:
    """Each row's place and value, of those columns alone; raises ConfigError for a malformed file."""
    import pyarrow
    from pyarrow import parquet

    with open_file(file, ConfigError, hint=hint) as stream:
        try:
            table = parquet.ParquetFile(stream)
            if table.metadata.num_rows > MAX_ROWS:
                raise ConfigError(f"{file}: expected at most {MAX_ROWS} rows, found {table.metadata.num_rows}")
            rows = table.read(columns=list(columns)).to_pylist()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not a Parquet file: {error}", hint=hint) from None
    for number, row in enumerate(rows, start=1):
        where = f"{file}: row {number}"
        try:
            yield where, msgspec.convert(row, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: expected {', '.join(columns)}, found {error}", hint=hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSet:
    """Location of a data set, and how a row becomes the turns of a prompt."""

    repository: str
    files: tuple[str, ...]
    columns: tuple[str, ...]
    turns: Callable[[Fields], tuple[str, ...]]


def _reasoning(column: str) -> Callable[[Fields], tuple[str, ...]]:
    return lambda row: (f"{row[column]}{REASONING}",)


def _humaneval(row: Fields) -> tuple[str, ...]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return (f"{task}\n```python\n{row['prompt']}\n```",)


def _mt_bench(row: Fields) -> tuple[str, ...]:
    turns = row["prompt"]
    return tuple(turns) if isinstance(turns, list) else ()


def _live_code_bench(row: Fields) -> tuple[str, ...]:
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a"
        " correct Python program that matches the specification and passes all tests. You will NOT return anything"
        " except for the program"
    )
    form, code = "Use the following code structure:", row["starter_code"]
    if not code:
        form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    question = f"### Question:\n{row['question_content']}\n\n### Format: {form}\n```python\n{code}\n```"
    return (f"{role}\n\n{question}\n\n### Answer: (use the provided format with backticks)",)


HUB_SETS = {
    "gsm8k": HubSet(
        repository="openai/gsm8k", files=("main/test-00000-of-00001.parquet",), columns=("question",),
        turns=_reasoning("question"),
    ),
    "math500": HubSet(
        repository="HuggingFaceH4/MATH-500", files=("test.jsonl",), columns=("problem",), turns=_reasoning("problem")
    ),
    "aime25": HubSet(
        repository="MathArena/aime_2025", files=("data/train-00000-of-00001.parquet",), columns=("problem",),
        turns=_reasoning("problem"),
    ),
    "humaneval": HubSet(
        repository="openai/openai_humaneval", files=("openai_humaneval/test-00000-of-00001.parquet",),
        columns=("prompt",), turns=_humaneval,
    ),
    "mbpp": HubSet(
        repository="google-research-datasets/mbpp", files=("sanitized/test-00000-of-00001.parquet",),
        columns=("prompt",), turns=lambda row: (str(row["prompt"]),),
    ),
    "livecodebench": HubSet(
        repository="livecodebench/code_generation_lite",
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
        columns=("question_content", "starter_code"), turns=_live_code_bench,
    ),
    "mt-bench": HubSet(
        repository="HuggingFaceH4/mt_bench_prompts", files=("raw/question.jsonl",), columns=("prompt",),
        turns=_mt_bench,
    ),
}  # fmt: skip


def read_hub_set(name: str) -> tuple[str, list[Conversation]]:
    """Source with revision, and prompts; raises ConfigError for one that is unreachable or differs."""
    hub_set = HUB_SETS[name]
    files = [_file(hub_set.repository, file) for file in hub_set.files]
    prompts = [
        Conversation(id=f"{name}-{number}", turns=user_turns(*turns))
        for number, turns in enumerate((turns for file in files for turns in _turns(file, hub_set)), start=1)
    ]
    # The cache has the commit as the folder above the repository's files
    revision = files[0].parents[len(Path(hub_set.files[0]).parts) - 1].name
    return f"{hub_set.repository}@{revision} {' '.join(hub_set.files)}", prompts


def _turns(file: Path, hub_set: HubSet) -> Iterator[tuple[str, ...]]:
    hint = f"is it {hub_set.repository} as the reference reads it?"
    rows: Iterator[tuple[str, dict[str, object]]] = (
        read_json_lines(file, dict[str, object], ConfigError, what="an object", hint=hint)
        if file.suffix == ".jsonl"
        else read_parquet(file, hub_set.columns, dict[str, object], hint=hint)
    )
    for where, row in rows:
        if missing := [column for column in hub_set.columns if column not in row]:
            raise ConfigError(f"{where}: column {missing[0]} is missing", hint=hint)
        try:
            yield msgspec.convert(hub_set.turns(row), tuple[str, ...])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: expected texts, found {error}", hint=hint) from None


def _file(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"cannot download {file} from {repository}: {str(error).splitlines()[0]}",
            hint=f"where there is a network: hf download {repository} {file} --repo-type dataset",
        ) from None


class _SpeedBenchRow(msgspec.Struct, frozen=True):
    question_id: str
    category: str
    turns: tuple[str, ...] = ()
    messages: tuple[Turn, ...] = ()


def read_speed_bench(folder: Path, split: str) -> Iterator[Conversation]:
    """The prompts of one split; raises ConfigError if the folder lacks it or has only placeholders.

    The user prepared it, as its licence forbids redistributing them: NVIDIA/Model-Optimizer's
    examples/specdec_bench/prepare_data.py writes DIR/speed/SPLIT/test.parquet (question_id, category, turns); the data
    set's own script writes DIR/SPLIT.jsonl (question_id, category, messages).
    """
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
