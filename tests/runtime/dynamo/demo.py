# SPDX-License-Identifier: Apache-2.0
"""`make demo-cluster`: a frontend and two workers, an answer through them, and a worker killed in its middle."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import httpx2

from tests.engines import build
from tests.paths import FIXTURES
from tests.runtime.dynamo.cluster import Cluster, Worker, cluster
from tests.waiting import PATIENCE

TARGET = FIXTURES / "tiny-qwen3"
PROMPT = "def parse_args(argv):"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build(FIXTURES / "tiny-qwen3-dflash", directory / "demo", TARGET)
        print("starting Dynamo's frontend and two workers", flush=True)
        with cluster(directory, directory / "demo", TARGET, "--migration-limit", 3) as running:
            running.add_workers(2)
            print(f"{running.url}/v1/completions answers:\n")
            whole = stream(running, None)
            print(f"{PROMPT}{whole[:160]} ...\n")
            print("the same again, and its worker is killed (SIGKILL) in the middle", flush=True)
            migrated = stream(running, running.workers)
            if migrated != whole:
                raise SystemExit(f"the other worker: expected the same {len(whole)} characters, found {migrated!r}")
            print(f"the other worker went on: the same {len(whole)} characters")
            print("to run your own engine behind Dynamo: docs/scaling.md")


def stream(running: Cluster, workers: list[Worker] | None) -> str:
    """An answer; kills the worker that computes it."""
    text = ""
    body = running.body(PROMPT, max_tokens=1500, stream=True)
    with httpx2.stream("POST", f"{running.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            if workers and text:
                busy = [worker for worker in workers if worker.metric("vllm:num_requests_running")]
                for worker in busy:
                    worker.popen.kill()
                workers = None if busy else workers
    assert not workers, "no worker was killed"
    return text


if __name__ == "__main__":
    main()
