# SPDX-License-Identifier: Apache-2.0
"""`bench run`: what it would measure, what it refuses, and the points that it prints (tests/golden/bench_run.txt)."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from dflash_trt.cli.bench_tables import print_points
from dflash_trt.errors import BuildError, DFlashError, EndpointError, MissingDependencyError
from dflash_trt.files import workspace
from dflash_trt.observe.bench.point_record import BenchPoint, RequestRow
from dflash_trt.observe.bench.run_directory import sole_measurer
from tests.cli.commands import run_here
from tests.observe.bench.samples import UNPUBLISHED, counters, flat, point, run_of
from tests.observe.endpoints.canned import canned, models
from tests.paths import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "bench_run.txt"
DRAFTED = counters(1000, (900, 800, 700))


def sample(
    method: str, concurrency: int, rate: float, ttft_seconds: float, *, cut: int = 0, failed: int = 0
) -> BenchPoint:
    row = RequestRow(input_tokens=5, output_tokens=11, ttft_seconds=1.0, seconds=2.0)
    rows = (msgspec.structs.replace(row, is_cut=True),) * cut + (row,) * (100 - cut - failed)
    acceptance = UNPUBLISHED if method == "none" else DRAFTED
    made = point(method, concurrency, rate / concurrency, rate, rows=rows, failed=failed, acceptance=acceptance)
    return msgspec.structs.replace(made, latencies={"time_to_first_token": flat(ttft_seconds * 1e3)})


def test_it_fits_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are whole; what no request was is no column."""
    monkeypatch.setenv("COLUMNS", "80")
    fast = sample("none", 1, 88.2, 0.0312), sample("dflash-nvfp4", 1, 190.34, 0.0008)
    slow = sample("none", 256, 4278.04, 7.9872, cut=3), sample("dflash-nvfp4", 256, 20306.2, 17.2192, cut=2, failed=5)
    for name, points in (("a", fast), ("b", slow)):
        print_points(run_of(tmp_path / name, *points), as_json=False)
    assert capsys.readouterr().out == GOLDEN.read_text()


@pytest.fixture
def url() -> Iterator[str]:
    with canned({"/v1/models": models("vllm", "big"), "/version": '{"version": "0.33.0"}'}) as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n')
    return file


def test_a_plan_writes_nothing(
    url: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = (
        "bench", "run", "--endpoint", f"none={url}", "--endpoint", f"dflash={url}/v1", "--prompts", prompts,
        "--concurrency", "1,8", "--set", "dflash.temperature=0.6", "--hardware", "8x B300", "--num-gpus", "8",
        "--extra", "top_p=0.9", "--extra", "reasoning_effort=low", "--extra", "greedy=true",
        "-o", tmp_path / "run", "--dry-run",
    )  # fmt: skip
    run_here(*arguments, "--json")
    found = json.loads(capsys.readouterr().out)["run"]
    assert [method["url"] for method in found["methods"]] == [url, url]
    assert {method["runtime"] for method in found["methods"]} == {"vllm"}
    assert found["methods"][1]["overrides"] == {"temperature": 0.6}
    assert (found["server"], found["num_gpus"], found["concurrencies"]) == ("8x B300", 8, [1, 8])
    assert found["request"] == {
        "template": "chat", "thinking": None, "temperature": 0.0, "max_tokens": 4096, "ignore_eos": False,
        "extra": {"top_p": 0.9, "reasoning_effort": "low", "greedy": True},
    }  # fmt: skip
    assert len(found["warnings"]) == 2
    run_here(*arguments)
    out = capsys.readouterr().out
    assert "the methods differ in temperature: 0.0 for none, 0.6 for dflash" in out
    assert "2 of mine" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "1e16"], "1e+16 is not in the range"),
        (["--max-tokens", "1" * 20], "is not in the range"),
        (["--concurrency", "1,x"], "expected numbers of requests as in 1,2,4"),
        (["--endpoint", "nothing"], "expected NAME=URL, found 'nothing'"),
        (["--endpoint", "a=http://h"], "--endpoint: expected each name once"),
        (["--target", "t"], "belong to --engine"),
        (["--engine", "e", "--target", "t"], "expected no --endpoint"),
        (["--set", "a.speed=1"], "expected METHOD.FIELD=VALUE with temperature"),
        (["--set", "a.temperature=hot"], "expected a value of temperature, found 'hot'"),
        (["--endpoint", "../x=http://h"], "expected a name that can be a folder's"),
        (["--template", "completions"], "expected prompts of one turn"),
        (["--extra", "stream=false"], "--extra: expected a field that no other option sets"),
        (["--extra", "top_p"], "expected FIELD=VALUE, found"),
        (["--goodput", ""], "limits must look like"),
        (["--goodput", "ttft:200"], "limits must look like"),
        (["--goodput", "request_latency:0.0"], "limits must look like"),
        (["--goodput", "request_latency:nan"], "limits must look like"),
        (["--goodput", "request_latency:1 request_latency:2"], "limits must look like"),
        (["--model", "small"], "expected the model 'small', found big"),
        (["--category", "coding"], "expected one of none, found coding"),
    ],
)
def test_refusals(options: list[str], message: str, url: str, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises((DFlashError, click.UsageError)) as error:
        run_here("bench", "run", "--endpoint", f"a={url}", "--prompts", prompts, "-o", tmp_path / "run", *options)
    assert message in getattr(error.value, "message", "")
    assert not (tmp_path / "run").exists()


def test_one_run_at_a_time(url: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sole_measurer(tmp_path / "run"):
        monkeypatch.setattr(workspace, "HELD", set())  # another process would see the same
        with pytest.raises(BuildError, match=": another command that writes it") as error:
            run_here("bench", "run", "--endpoint", f"a={url}", "--prompts", prompts, "-o", tmp_path / "run")
    assert error.value.hint == "wait for its end or choose another -o RUN"
    assert not (tmp_path / "run").exists()


def test_without_a_method(prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="expected --endpoint NAME=URL or --engine"):
        run_here("bench", "run", "--prompts", prompts, "-o", tmp_path / "run")


def test_the_key_is_sent(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with canned({"/v1/models": (401, "no")}) as locked, pytest.raises(DFlashError, match="no API key in it"):
        run_here(
            "bench", "run", "--endpoint", f"a={locked}", "--prompts", prompts, "-o", tmp_path / "run",
            "--api-key-file", tmp_path / "key",
        )  # fmt: skip


def test_a_server_is_asked_before_a_data_set_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["bench", "run", "--endpoint", "a=http://127.0.0.1:9", "--prompts", "gsm8k", "-o", tmp_path / "run"]
    with pytest.raises(EndpointError, match="cannot connect to http://"):
        run_here(*arguments, "--dry-run")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match="no aiperf"):
        run_here(*arguments)
