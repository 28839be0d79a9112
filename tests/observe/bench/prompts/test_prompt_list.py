# SPDX-License-Identifier: Apache-2.0
"""Prompts that a run reads: our own lines and others', SPEED-Bench's folder, the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.prompts.conversation import Turn
from dflash_trt.observe.bench.prompts.data_sets import HUB_SETS
from dflash_trt.observe.bench.prompts.prompt_list import PromptList, read_prompt_list

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(file: Path, *lines: dict[str, object]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(file)


def texts(prompts: PromptList) -> list[list[str]]:
    return [[turn.content for turn in prompt.turns] for prompt in prompts.prompts]


def test_our_own_lines(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "c"}]
    given = write(tmp_path / "mine.jsonl", {"prompt": "a", "id": "x"}, {"turns": ["b", "b2"]}, {"messages": messages})
    found = read_prompt_list(given)
    assert (found.name, found.source, found.categories) == ("mine", given, ())
    assert [prompt.id for prompt in found.prompts] == ["x", "line2", "line3"]
    assert texts(found) == [["a"], ["b", "b2"], ["be", "c"]]
    assert found.prompts[2].turns[0] == Turn("system", "be")
    assert [prompt.num_requests for prompt in found.prompts] == [1, 2, 1]


def test_conversations_without_a_user_are_skipped(tmp_path: Path) -> None:
    model, human = {"from": "gpt", "value": "x"}, {"from": "human", "value": "b"}
    rows: list[dict[str, object]] = [
        {"id": "1", "conversations": []},
        {"id": "2", "conversations": [model]},
        {"id": "3", "conversations": [{"from": "human", "value": ""}, model]},
        {"id": "4", "conversations": [model, human]},
    ]
    found = read_prompt_list(write(tmp_path / "sharegpt.jsonl", *rows))
    assert ([prompt.id for prompt in found.prompts], found.num_skipped) == (["4"], 3)
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompt_list(write(tmp_path / "sharegpt.jsonl", *rows[:3]))
    with pytest.raises(ConfigError, match="empty turn"):  # our own lines are as their writer wanted them
        read_prompt_list(write(tmp_path / "mine.jsonl", {"prompt": ""}))


def test_questions_of_mt_bench(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["c"]}
    (prompt,) = read_prompt_list(write(tmp_path / "question.jsonl", row)).prompts
    assert (prompt.id, prompt.category, prompt.num_requests) == ("81", "writing", 2)


def test_lines_of_others(tmp_path: Path) -> None:
    """An OpenAI batch, ShareGPT and a Mooncake trace, as AIPerf names their fields."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    said = [{"from": "human", "value": "b"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "c"}]
    rows = [
        {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "r2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}},
        {"id": "QWJhYvA_0", "conversations": said},
        {"timestamp": 1000, "text_input": "t", "output_length": 4, "hash_ids": [1]},
        {"timestamp": 1500.5, "messages": [{"role": "user", "content": "m"}], "session_id": "s"},
    ]
    found = read_prompt_list(write(tmp_path / "p.jsonl", *rows))
    assert texts(found) == [["a"], ["p"], ["b", "c"], ["t"], ["m"]]
    assert [prompt.id for prompt in found.prompts] == ["r1", "r2", "QWJhYvA_0", "line4", "line5"]
    assert [prompt.timestamp for prompt in found.prompts][3:] == [1000, 1500.5]
    ours = read_prompt_list(write(tmp_path / "q.jsonl", {"prompt": "a"}))
    assert b"timestamp" not in msgspec.json.encode(ours.prompts), "an old run's hash stands"


def test_categories_and_numbers(tmp_path: Path) -> None:
    rows = [{"prompt": f"{kind}{n}", "category": kind, "id": f"{kind}{n}"} for n in range(3) for kind in "ab"]
    found = read_prompt_list(write(tmp_path / "p.jsonl", *rows))
    assert found.categories == ("a", "b")
    assert texts(found.only(["b"])) == [["b0"], ["b1"], ["b2"]]
    assert texts(found.exactly(2)) == [["a0"], ["a1"], ["b0"], ["b1"]]
    repeated = found.only(["a"]).exactly(5)
    assert texts(repeated) == [["a0"], ["a1"], ["a2"], ["a0"], ["a1"]]
    assert len({prompt.id for prompt in repeated.prompts}) == 5
    assert found.record(is_pooled=False).categories == ("a", "b")
    assert found.record(is_pooled=True).categories == ()
    assert found.record(is_pooled=True).sha256 != found.exactly(2).record(is_pooled=True).sha256
    with pytest.raises(ConfigError, match="--category: expected one of a, b, found c"):
        found.only(["c"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no prompts"),
        ([{"id": "x"}], "expected one of prompt, turns and messages"),
        ([{"prompt": "a", "turns": ["b"]}], "expected one of prompt, turns and messages"),
        ([{"prompt": ""}], "has an empty turn"),
        ([{"turns": []}], "expected user turns"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "expected user turns"),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], "the id x occurs twice"),
        ([{"prompt": "a", "category": "c"}, {"prompt": "b"}], "1 of 2 prompts have a category"),
        ([{"prompt": 3}], "p.jsonl:1: expected a prompt"),
        ([{"timestamp": 1, "input_length": 90}], "expected a prompt's text, found its length alone"),
        ([{"body": {"prompt": "a"}, "text_input": "b"}], "expected one of prompt, turns and messages"),
        ([{"text": "a"}], "unknown field `text`"),
    ],
)
def test_what_is_no_prompt(lines: list[dict[str, object]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompt_list(write(tmp_path / "p.jsonl", *lines))


def test_what_is_nothing_or_a_placeholder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file, a SPEED-Bench folder or one of gsm8k, math500"):
        read_prompt_list(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="--split: expected --prompts to be a SPEED-Bench folder"):
        read_prompt_list(write(tmp_path / "p.jsonl", {"prompt": "a"}), split="qualitative")
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nx"
    messages = [{"role": "user", "content": text}]
    write(tmp_path / "qualitative.jsonl", {"question_id": "q", "category": "c", "messages": messages})
    with pytest.raises(ConfigError, match="found a placeholder"):
        read_prompt_list(str(tmp_path))


SPEED = [("q1", "coding", ["a", "b"]), ("q2", "math", ["c"])]


def test_speed_bench_as_prepare_data_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "speed" / "qualitative" / "test.parquet"
    file.parent.mkdir(parents=True)
    ids, categories, turns = zip(*SPEED, strict=True)
    columns = {"question_id": list(ids), "category": list(categories), "turns": list(turns), "source": ["s", "s"]}
    parquet.write_table(pyarrow.table(columns), file)
    for folder in (tmp_path, tmp_path / "speed"):
        found = read_prompt_list(str(folder))
        assert (found.name, found.categories) == ("speed-bench-qualitative", ("coding", "math"))
        assert texts(found) == [["a", "b"], ["c"]]
    file.write_bytes(b"PAR1 and nothing")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        read_prompt_list(str(tmp_path))


def test_speed_bench_as_lines(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    write(tmp_path / "throughput_1k.jsonl", {"question_id": "q", "category": "mixed", "messages": messages})
    found = read_prompt_list(str(tmp_path), split="throughput_1k")
    assert (found.categories, texts(found)) == (("mixed",), [["a"]])
    with pytest.raises(ConfigError, match="has neither") as error:
        read_prompt_list(str(tmp_path))
    assert "prepare_data.py" in str(error.value.hint)
    with pytest.raises(ConfigError, match="--split: expected one of qualitative, "):
        read_prompt_list(str(tmp_path), split="../x")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


ROWS: dict[str, tuple[dict[str, object], list[str]]] = {
    "gsm8k": ({"question": "1+1?", "answer": "2"}, ["1+1?\nPlease reason step by step"]),
    "math500": ({"problem": "x", "answer": "2"}, ["x\nPlease reason step by step"]),
    "aime25": ({"problem": "x", "answer": 2}, ["x\nPlease reason step by step"]),
    "humaneval": ({"prompt": "def f():\n"}, ["```python\ndef f():\n\n```"]),
    "mbpp": ({"prompt": "Write f."}, ["Write f."]),
    "livecodebench": ({"question_content": "Sum.", "starter_code": ""}, ["### Question:\nSum.\n\n### Format: Write"]),
    "mt-bench": ({"prompt": ["one", "two"]}, ["one", "two"]),
}


@pytest.mark.parametrize("name", HUB_SETS)
def test_sets_of_the_hub_from_its_cache(name: str, hub: Path) -> None:
    found, (row, expected) = HUB_SETS[name], ROWS[name]
    repository = hub / f"datasets--{found.repository.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in found.files:
        file = repository / "snapshots" / COMMIT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".jsonl":
            write(file, row)
        else:
            parquet.write_table(pyarrow.table({key: [value] for key, value in row.items()}), file)
    prompts = read_prompt_list(name)
    assert prompts.source.startswith(f"{found.repository}@{COMMIT} ")
    assert len(prompts.prompts) == len(found.files)
    got = texts(prompts)[0]
    assert len(got) == len(expected)
    assert all(part in text for part, text in zip(expected, got, strict=True)), got


def test_a_set_that_is_not_there(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot download main/.* from openai/gsm8k") as error:
        read_prompt_list("gsm8k")
    assert "hf download openai/gsm8k main/test-00000-of-00001.parquet --repo-type dataset" in str(error.value.hint)
