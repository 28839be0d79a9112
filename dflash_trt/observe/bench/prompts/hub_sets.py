# SPDX-License-Identifier: Apache-2.0
"""Data sets on the hub that DFlash is published with, as its authors turn their rows into prompts.

Files, splits and templates are those of dflash/benchmark.py in z-lab/dflash; for AIME25 and LiveCodeBench of its
predecessor, model/utils.py. Files are read as data; no code of a repository is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json_lines
from dflash_trt.observe.bench.prompts.conversation import Conversation, user_turns
from dflash_trt.observe.bench.prompts.parquet_rows import read_parquet

Fields = Mapping[str, object]
REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."


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
