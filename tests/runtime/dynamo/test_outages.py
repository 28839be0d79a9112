# SPDX-License-Identifier: Apache-2.0
"""A frontend that ends, a discovery folder that is deleted, a worker that is stopped or cut off: nothing hangs."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from tests.runtime.dynamo.cluster import (
    Cluster,
    Stream,
    Worker,
    check,
    cluster,
    single_runs,
    streamed,
    until,
)
from tests.runtime.dynamo.conftest import TARGET
from tests.waiting import PATIENCE

pytestmark = pytest.mark.full
PROMPTS = [f"def f{i}(x, y):" for i in range(32)]


async def have_begun(streams: Sequence[Stream]) -> None:
    await until(lambda: all(stream.num_chunks >= 3 for stream in streams))


def num_running(workers: Sequence[Worker]) -> float:
    return sum(worker.metric("vllm:num_requests_running") for worker in workers)


@pytest.mark.parametrize("stop", ["kill", "terminate"])
def test_frontend_ends_among_streams(engine: Path, tmp_path: Path, stop: str) -> None:
    """kill -9: each client hears of it at once, and slots are free. SIGTERM: it ends what it has begun."""
    with cluster(tmp_path, engine, TARGET) as running:
        workers = running.add_workers(2)

        async def end_frontend(streams: Sequence[Stream]) -> None:
            await have_begun(streams[:8])
            getattr(running.frontend.popen, stop)()

        streams = streamed(running, PROMPTS, end_frontend, max_tokens=600)
        running.frontend.popen.wait(PATIENCE)
        if stop == "terminate":
            check(streams, single_runs(engine, PROMPTS, max_tokens=600))
        else:
            assert ["ProtocolError" in str(stream.problems) for stream in streams] == [True] * len(streams)
        asyncio.run(until(lambda: num_running(workers) == 0))
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{running.url}/health")

        running.start_frontend()
        running.await_workers()
        check(streamed(running, PROMPTS), single_runs(engine, PROMPTS))


@pytest.mark.parametrize("deleted", ["files", "folder"])
def test_discovery_is_deleted(engine: Path, tmp_path: Path, deleted: str) -> None:
    """Running requests are completed. Dynamo 1.6.1 registers a worker once: each worker exits with an error, to be
    restarted.

    A frontend watches the folder that existed when it started: it never sees workers that register in a new one.
    """
    with cluster(tmp_path, engine, TARGET) as running:
        workers = running.add_workers(2)

        async def delete(streams: Sequence[Stream]) -> None:
            await have_begun(streams[:8])
            for path in running.discovery.glob("v1/*/*"):
                path.unlink()
            if deleted == "folder":
                shutil.rmtree(running.discovery)

        check(streamed(running, PROMPTS, delete), single_runs(engine, PROMPTS))
        check_ended(workers)
        if deleted == "folder":
            running.frontend.popen.kill()
            running.frontend.popen.wait(PATIENCE)
            running.start_frontend()
        running.add_workers(2)
        check(streamed(running, PROMPTS), single_runs(engine, PROMPTS))


def check_ended(workers: Sequence[Worker]) -> None:
    for worker in workers:
        assert worker.popen.wait(PATIENCE) == 1
        assert "expected the files by which frontends find this worker" in worker.log.read_text()


def test_worker_that_was_stopped_is_not_left_alone(engine: Path, tmp_path: Path) -> None:
    """The others take its files away after ten seconds: as it goes on, it ends what it had begun, with an error."""
    with cluster(tmp_path, engine, TARGET) as running:
        stopped, other = running.add_workers(2)

        async def stop(streams: Sequence[Stream]) -> None:
            await have_begun(streams)
            stopped.popen.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(running.frontend.wait_until, lambda: running.num_instances() == 1)
            assert await asyncio.gather(*(ask(running, prompt) for prompt in PROMPTS[:4])) == [200] * 4
            stopped.popen.send_signal(signal.SIGCONT)

        check(streamed(running, PROMPTS, stop, max_tokens=600), single_runs(engine, PROMPTS, max_tokens=600))
        check_ended([stopped])
        assert other.metric("vllm:request_success_total") == 16 + 4


async def ask(running: Cluster, prompt: str) -> int:
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(f"{running.url}/v1/completions", json=running.body(prompt, max_tokens=10))
    return answer.status_code
