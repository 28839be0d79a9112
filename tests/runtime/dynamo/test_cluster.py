# SPDX-License-Identifier: Apache-2.0
"""Dynamo's real frontend with real workers: every answer is that of a single run, whatever happens to a worker."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.dynamo import MAX_SYSTEM_PORT
from dflash_trt.errors import ConfigError
from dflash_trt.llm import LLM
from dflash_trt.runtime.dynamo.file_discovery import ADDRESSES
from tests import waiting
from tests.cli.commands import run_here
from tests.fixtures_data import without_template
from tests.runtime.dynamo.cluster import (
    Cluster,
    Stream,
    check,
    cluster,
    dynamo_python,
    single_runs,
    streamed,
    terminate,
    until,
)
from tests.runtime.dynamo.conftest import TARGET
from tests.waiting import PATIENCE

MANY_PROMPTS = [f"def f{i}(x, y):" for i in range(500)]
PROMPTS = MANY_PROMPTS[:64]
FEW_TOKENS = 60


def count(running: Cluster, name: str) -> list[int]:
    """A counter of each worker, by its name in the metrics."""
    return [int(worker.metric(f"vllm:{name}_total")) for worker in running.workers]


@pytest.mark.full
def test_every_stream_is_its_single_run(engine: Path, tmp_path: Path) -> None:
    """Workers join one after another, and take their share of the next 500 at once."""
    texts = single_runs(engine, MANY_PROMPTS, FEW_TOKENS)
    with cluster(tmp_path, engine, TARGET, "--router-mode", "round-robin") as running:
        before = [0] * 4
        for joining in (1, 1, 2):
            running.add_workers(joining)
            check(streamed(running, MANY_PROMPTS, max_tokens=FEW_TOKENS), texts)
            after = count(running, "request_success")
            assert [now - then for now, then in zip(after, before, strict=False)] == [500 // len(after)] * len(after)
            before[: len(after)] = after
        assert sum(count(running, "generation_tokens")) == 3 * 500 * FEW_TOKENS


@pytest.mark.full
def test_the_openai_client_counts_what_the_workers_count(engine: Path, tmp_path: Path) -> None:
    async def ask(running: Cluster) -> list[tuple[int, int]]:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE) as client:
            with pytest.raises(BadRequestError, match="length_penalty"):
                await client.completions.create(model=running.model, prompt="a", extra_body={"length_penalty": 2.0})
            (model,) = (await client.models.list()).data
            assert model.id == running.model
            asked = [
                client.completions.create(
                    model=running.model, prompt=prompt, max_tokens=10 + index % 7, temperature=index % 2
                )
                for index, prompt in enumerate(PROMPTS[:40])
            ]
            usages = [answer.usage for answer in await asyncio.gather(*asked)]
            return [(usage.prompt_tokens, usage.completion_tokens) for usage in usages if usage is not None]

    with cluster(tmp_path, engine, TARGET) as running:
        running.add_workers(2)
        prompt_tokens, answer_tokens = zip(*asyncio.run(ask(running)), strict=True)
        assert sum(count(running, "request_success")) == len(answer_tokens) == 40
        assert sum(count(running, "prompt_tokens")) == sum(prompt_tokens)
        assert sum(count(running, "generation_tokens")) == sum(answer_tokens)


def test_two_workers(engine: Path, tmp_path: Path) -> None:
    target = without_template("tiny-qwen3", tmp_path)
    with cluster(tmp_path, engine, target, "--router-mode", "round-robin") as running:
        workers = running.add_workers(2, "--host", "localhost")
        assert "no chat template: tiny serves completions only" in workers[0].log.read_text()
        check(streamed(running, PROMPTS[:16]), single_runs(engine, PROMPTS[:16]))
        assert all(worker.metric("vllm:request_success_total") == 8 for worker in workers)
        check_one_answer(running, engine)
        check_refused(running)
        check_disconnect(running)


def check_one_answer(running: Cluster, engine: Path) -> None:
    """Sampled with a seed, with log probabilities, and what it cost."""
    fields = {"max_tokens": 20, "temperature": 0.7, "seed": 5, "logprobs": 1}
    body = running.body(PROMPTS[0], **fields, nvext={"extra_fields": ["engine_data"]})
    answer = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE).json()
    with LLM(engine, TARGET, max_batch_size=1) as llm:
        params = SamplingParams(max_tokens=20, temperature=0.7, seed=5, logprobs=True, ignore_eos=True)
        expected = llm.generate(PROMPTS[0], params)[0]
    (choice,) = answer["choices"]
    assert choice["text"] == expected.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 20
    speculative = answer["nvext"]["engine_data"]["metrics"]["speculative_decoding"]
    assert speculative["num_draft_tokens"] >= speculative["num_accepted_draft_tokens"]
    assert speculative["num_spec_tokens"] == 7


def check_refused(running: Cluster) -> None:
    answer = httpx2.post(f"{running.url}/v1/completions", json=running.body("a", length_penalty=2.0), timeout=PATIENCE)
    assert answer.status_code == 400
    assert "length_penalty" in answer.json()["message"], answer.text


def check_disconnect(running: Cluster) -> None:
    """A request whose client has gone frees its slot."""
    before = sum(worker.metric("vllm:generation_tokens_total") for worker in running.workers)
    with httpx2.stream("POST", f"{running.url}/v1/completions", timeout=PATIENCE,
                      json=running.body("a", max_tokens=2000, stream=True)) as response:  # fmt: skip
        lines = response.iter_lines()  # closes the connection when it is dropped
        next(lines)
        assert sum(worker.metric("vllm:num_requests_running") for worker in running.workers) == 1
    waiting.until(lambda: not sum(worker.metric("vllm:num_requests_running") for worker in running.workers))
    assert sum(worker.metric("vllm:generation_tokens_total") for worker in running.workers) - before < 2000


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no.such.invalid", "expected this machine's address or name, found no.such.invalid: "),
        ("192.0.2.1", "found 192.0.2.1: Cannot assign requested address"),
        ("0.0.0.0", "expected the address by which frontends reach this machine, found 0.0.0.0"),
    ],
)
def test_an_unreachable_host_is_refused(engine: Path, host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--host: .*{re.escape(message)}"):
        run_here("dynamo", engine, "--host", host)


def test_a_port_in_use_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's own worker goes on without metrics."""
    for name in ADDRESSES:
        monkeypatch.setenv(name, "127.0.0.1")
    with (
        low_port() as port,
        pytest.raises(ConfigError, match=f"^--metrics-port: port {port} on .* cannot be used: Address already in use"),
    ):
        run_here("dynamo", engine, "--metrics-port", port)


@contextmanager
def low_port() -> Iterator[int]:
    """A listening port below the kernel's ephemeral ones, as Dynamo requires."""
    for port in range(20000, MAX_SYSTEM_PORT):
        try:
            listening = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with listening:
            yield port
        return


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (["--cache-gib", "1e-7"], {}, "found 0\n\nhint: give the caches more with --cache-gib\n"),
        (["--tool-call-parser", "nosuch"], {}, ", found nosuch\n"),
        (["--reasoning-parser", "nosuch"], {}, ", found nosuch\n"),
        ([], {"DYN_REQUEST_PLANE": "quux"}, "Invalid request plane mode: 'quux'. Valid options are: 'nats', 'tcp'\n"),
    ],
)
def test_what_does_not_load_is_one_error(
    engine: Path, options: list[str], environment: dict[str, str], expected: str
) -> None:
    fixed = ["--target", str(TARGET), "--discovery-backend", "mem"]
    command = [dynamo_python(), "-m", "dflash_trt", "dynamo", str(engine), *fixed, *options]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.endswith(expected)
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_a_discovery_folder_that_is_none_is_one_error(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [dynamo_python(), "-m", "dflash_trt", "dynamo", engine, "--target", TARGET, "--discovery-backend", "file"]
    result = subprocess.run(
        command, env=os.environ | {"DYN_FILE_KV": str(tmp_path / "file")},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "error: expected Dynamo's runtime, with discovery by file, found " in result.stderr
    assert "Not a directory" in result.stderr
    assert "hint: let DYN_FILE_KV name a folder in which this user may write" in result.stderr


def test_extra_cannot_name_ai_dynamo() -> None:
    """When this fails, ai-dynamo can be installed with its dependencies: name it in pyproject's extra `dynamo`."""
    script = "from importlib.metadata import requires; print(*requires('ai-dynamo'), sep='\\n')"
    listed = subprocess.run([dynamo_python(), "-c", script], capture_output=True, text=True, check=True).stdout
    assert "\naisimulate==0.13.0" in listed


@pytest.mark.full
@pytest.mark.parametrize("stop", ["kill", "terminate"])
def test_worker_ends_among_streams(engine: Path, tmp_path: Path, stop: str) -> None:
    """kill -9: what it had begun goes on elsewhere. SIGTERM: it ends what it has begun."""
    with cluster(tmp_path, engine, TARGET, "--migration-limit", 3) as running:
        first, second = running.add_workers(2, "--max-batch-size", 32)

        async def end_first(streams: Sequence[Stream]) -> None:
            await until(lambda: all(stream.num_chunks >= 3 for stream in streams))
            assert first.metric("vllm:num_requests_running") >= 20
            getattr(first.popen, stop)()

        check(streamed(running, PROMPTS, end_first), single_runs(engine, PROMPTS))
        code = first.popen.wait(PATIENCE)
        assert (code == 0) == (stop == "terminate"), first.log.read_text()
        assert second.metric("vllm:request_success_total") == (64 if stop == "kill" else 32)
        # A worker that joins takes load.
        (third,) = running.add_workers(1)
        check(streamed(running, PROMPTS[:16]), single_runs(engine, PROMPTS[:16]))
        assert third.metric("vllm:request_success_total") >= 4
        assert [terminate(worker) for worker in (second, third)] == [0, 0]


@pytest.mark.full
def test_prefixes_are_routed_to_their_pages(engine: Path, tmp_path: Path) -> None:
    """Eight long prefixes, asked four times in turn: without events half of the repeats would miss."""
    prefixes = ["".join(f"def f{i}_{j}(x): return x + {j}\n" for j in range(40)) for i in range(8)]
    with cluster(tmp_path, engine, TARGET, "--router-mode", "kv", "--kv-cache-block-size", 32) as running:
        workers = running.add_workers(2)
        for prompt in prefixes:
            ask(running, prompt)
        served = [worker.metric("vllm:request_success_total") for worker in workers]
        assert min(served) >= 1, "the first of each prefix is spread by load"
        hits = [
            cached for repeat in range(3) for prompt in prefixes for cached in [ask(running, f"{prompt}# {repeat}")]
        ]
        assert min(hits) >= 320, hits
        assert sum(worker.metric("vllm:prefix_cache_hits_total") for worker in workers) == sum(hits)


def ask(running: Cluster, prompt: str) -> int:
    """Tokens of the prompt that were cached."""
    body = running.body(prompt, max_tokens=4)
    usage = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


FAILING = """
from dflash_trt.cli import main
from dflash_trt.runtime.decoder import Decoder

step, steps = Decoder.step, []

def planted(self):
    steps.append(step(self))
    if len(steps) == 40:
        raise ValueError("planted")

Decoder.step = planted
main()
"""


@pytest.mark.full
def test_a_decoder_that_fails_ends_its_worker(engine: Path, tmp_path: Path) -> None:
    """Requests of the failed worker go on elsewhere, and its exit code reports the failure."""
    with cluster(tmp_path, engine, TARGET, "--migration-limit", 3) as running:
        (failing,) = running.add_workers(1, start=("-c", FAILING))
        running.add_workers(1)
        check(streamed(running, PROMPTS[:8]), single_runs(engine, PROMPTS[:8]))
        assert failing.popen.wait(PATIENCE) == 1
        assert "error: the decoder has failed: planted" in failing.log.read_text()
