# SPDX-License-Identifier: Apache-2.0
"""Prompts that a run reads, and what it writes: it is read back, and what does not add up is refused.

Prompts are our own, of SPEED-Bench's folder and of the hub's cache. A run continues with its own settings only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.observe.bench import run_directory
from dflash_trt.observe.bench.conversation import Turn
from dflash_trt.observe.bench.hub_sets import HUB_SETS
from dflash_trt.observe.bench.prompt_list import PromptList, read_prompt_list
from dflash_trt.observe.bench.run_directory import (
    begin_run,
    read_point,
    read_run,
    sole_measurer,
    write_point,
    write_run,
)
from dflash_trt.observe.bench.run_record import BenchRun, request_of
from dflash_trt.observe.bench.run_settings import differences, settings_warnings
from tests.observe.bench import samples
from tests.observe.bench.samples import counters, point, run

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
        ([{"prompt": ""}], "expected a text in each turn"),
        ([{"turns": []}], "expected user turns"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "expected user turns"),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], "x twice"),
        ([{"prompt": "a", "category": "c"}, {"prompt": "b"}], "a category for all prompts or for none, found 1 of 2"),
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
    with pytest.raises(ConfigError, match="expected a Parquet file"):
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
    with pytest.raises(ConfigError, match=r"openai/gsm8k: expected main/.* in the hub's cache or on the hub") as error:
        read_prompt_list("gsm8k")
    assert "hf download openai/gsm8k main/test-00000-of-00001.parquet --repo-type dataset" in str(error.value.hint)


ADDS_UP = "acceptance: the counts do not add up"
SAMPLE = point("dflash", 2, 50.0, 90.0, acceptance=counters(10, (8, 5, 5)), failed=1)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = run("none", "dflash", concurrencies=(1, 2))
    write_run(tmp_path, whole)
    points = (point("none", 1, 20.0, 15.0), SAMPLE)
    for one in points:
        write_point(tmp_path, one)
    assert read_run(tmp_path) == whole
    assert run_directory.read_points(tmp_path, whole) == points
    assert read_point(tmp_path, "none", None, 2) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["points", "run.json"]
    one = point("dflash", 1, 50.0, 40.0, category="coding")
    assert write_point(tmp_path, one) == tmp_path / "points" / "dflash" / "coding" / "c1.json"
    assert read_point(tmp_path, "dflash", "coding", 1) == one


def test_a_point_is_replaced_by_one_that_is_measured_again_and_nothing_else_is(tmp_path: Path) -> None:
    write_point(tmp_path, SAMPLE)
    write_point(tmp_path, again := point("dflash", 2, 60.0, 99.0))
    assert read_point(tmp_path, "dflash", None, 2) == again
    run_directory.point_file(tmp_path, "dflash", None, 2).write_text("somebody's notes")
    with pytest.raises(BuildError, match="expected a record of a bench run or none, found another file"):
        write_point(tmp_path, SAMPLE)


def test_points_and_runs_that_are_not_there(tmp_path: Path) -> None:
    write_point(tmp_path, SAMPLE).rename(run_directory.point_file(tmp_path, "dflash", None, 4))
    with pytest.raises(ConfigError, match=r"expected the point \('dflash', None, 4\), found \('dflash', None, 2\)"):
        read_point(tmp_path, "dflash", None, 4)
    with pytest.raises(ConfigError, match="No such file") as raised:
        read_run(tmp_path)
    assert raised.value.hint == "`dflash-trt bench run -o RUN` writes it"


def set_to(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one value: its path, then the value."""
    *parents, key, value = path

    def change(document: dict[str, Any]) -> None:
        for parent in parents:
            document = document[parent]
        document[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("errors", {"x": 0}), "errors"),
        (set_to("latencies", {"time": 1}), "latencies"),
        (set_to("rows", 0, "acceptance", {"steps": 3}), "unknown field `steps`"),
        (set_to("rows", 0, "seconds", -1), "rows"),
        (set_to("acceptance", "counts", "accepted", 31), ADDS_UP),
        (set_to("acceptance", "counts", "accepted_by_position", [5, 8, 5]), ADDS_UP),
        (set_to("acceptance", "counts", "accepted_by_position", [11, 5, 2]), ADDS_UP),
        (set_to("acceptance", "counts", "accepted_by_position", [8, 5, 4]), ADDS_UP),
        (set_to("acceptance", {"source": "gauges"}), "how"),
        (set_to("acceptance", "sampled_tau", 0.5), "sampled_tau"),
        (set_to("schema", "dflash-trt/bench/1"), "expected dflash-trt/bench/3, found 'dflash-trt/bench/1'"),
        (set_to("method", "../x"), "expected a name that can be a folder's"),
        (set_to("speed", 3), "unknown field `speed`"),
        (set_to("seconds", float("nan")), "not finite"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_fails(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    file = write_point(tmp_path, SAMPLE)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message) as raised:
        read_point(tmp_path, "dflash", None, 2)
    assert str(file) in raised.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("methods", []), "expected methods, and concurrencies each once"),
        (set_to("methods", 0, "name", "a/b"), "methods: expected a name that can be a folder's, found 'a/b'"),
        (set_to("concurrencies", [1, 1]), "concurrencies each once"),
        (set_to("concurrencies", [0]), "concurrencies"),
        (set_to("prompt_set", "categories", ["aiperf"]), "expected a name"),
        (set_to("num_gpus", 0), "num_gpus"),
        (set_to("request", "template", "alpaca"), "template"),
    ],
)
def test_a_run_that_cannot_be_fails(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    write_run(tmp_path, run("none"))
    document = json.loads((tmp_path / "run.json").read_text())
    change(document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path)


def changed(run: BenchRun, **fields: object) -> BenchRun:
    return msgspec.convert({**msgspec.to_builtins(run), **fields}, BenchRun)


RUN = samples.run("none", "dflash", concurrencies=(1, 2))


def test_a_run_is_begun_and_gone_on_with(tmp_path: Path) -> None:
    with sole_measurer(tmp_path / "run"):
        assert begin_run(tmp_path / "run", RUN) == RUN
    later = changed(RUN, created="2030-01-01T00:00:00+00:00", command=["other"], warnings=["w"])
    assert begin_run(tmp_path / "run", later) == RUN  # when it was begun, and with which words, stays
    assert read_run(tmp_path / "run") == RUN
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no bench run"):
        begin_run(tmp_path, RUN)
    assert not (tmp_path / run_directory.RUN_FILE).exists()


def test_a_run_without_a_point_is_begun_anew(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
    other = changed(RUN, goodput="request_latency:9")
    assert begin_run(tmp_path, other) == read_run(tmp_path) == other


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
    write_point(tmp_path, point("none", 1, 20.0, 15.0))
    request = {**msgspec.to_builtins(RUN.request), "temperature": 0.7}
    methods = msgspec.to_builtins(RUN.methods)
    methods[1]["runtime_version"] = "9"
    other = changed(RUN, request=request, concurrencies=[1, 2, 4], methods=methods, versions={"aiperf": "1"})
    with pytest.raises(ConfigError) as error:
        begin_run(tmp_path, other)
    for said in ("request.temperature: 0.0 there, 0.7 asked for", "concurrencies: [1,2] there, [1,2,4] asked for",
                 'methods.dflash.runtime_version: ', '"9" asked for', "versions.aiperf: "):  # fmt: skip
        assert said in error.value.message
    assert "another -o" in str(error.value.hint)
    assert list(differences(RUN, RUN)) == []
    prompt_set = {**msgspec.to_builtins(RUN.prompt_set), "sha256": "1" * 64}
    assert [text.split(":")[0] for text in differences(RUN, changed(RUN, prompt_set=prompt_set))] == [
        "prompt_set.sha256"
    ]


def test_methods_that_differ_are_named() -> None:
    methods = msgspec.to_builtins(RUN.methods)
    methods[1]["overrides"] = {"temperature": 1.0, "thinking": "on"}
    methods[1]["model"] = "another"
    found = list(settings_warnings(changed(RUN, methods=methods, concurrencies=[1, 4096])))
    first = RUN.request.temperature
    assert f"the methods differ in temperature: {first} for none, 1.0 for dflash" in found
    assert "the methods differ in thinking: nothing for none, on for dflash" in [
        text.replace('"', "") for text in found
    ]
    assert any("models of different names: another" in text for text in found)
    assert any("never keep 4096 requests going" in text for text in found)
    assert request_of(RUN.request, changed(RUN, methods=methods).methods[1]).temperature == 1.0
    assert not any("differ" in text for text in settings_warnings(RUN))


def test_warnings_are_kept_once(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
    for _ in range(2):
        run_directory.add_warnings(tmp_path, ["the server was busy"])
    assert read_run(tmp_path).warnings == (*RUN.warnings, "the server was busy")
