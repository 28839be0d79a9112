# SPDX-License-Identifier: Apache-2.0
"""500 streams at once over one, two and four workers, and what clients of the field count of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError

from dflash_trt.errors import MissingDependencyError
from dflash_trt.observe.bench.aiperf_run import AiperfLoad, find_aiperf, run_load
from dflash_trt.observe.bench.data_sets import Conversation, PromptTurn
from dflash_trt.observe.bench.records import RequestSettings
from tests.runtime.dynamo.cluster import PATIENCE, Cluster, cluster
from tests.runtime.dynamo.conftest import TARGET
from tests.runtime.dynamo.streams import check, single_runs, streamed

pytestmark = pytest.mark.full
PROMPTS = [f"def f{i}(x, y):" for i in range(500)]
MAX_TOKENS = 60


def count(running: Cluster, name: str) -> list[int]:
    """A counter of each worker, by its name in the metrics."""
    return [int(worker.metric(f"vllm:{name}_total")) for worker in running.workers]


def test_every_stream_is_its_single_run(engine: Path, tmp_path: Path) -> None:
    """Workers join one after another, and take their share of the next 500 at once."""
    texts = single_runs(engine, PROMPTS, MAX_TOKENS)
    with cluster(tmp_path, engine, TARGET, "--router-mode", "round-robin") as running:
        before = [0] * 4
        for joining in (1, 1, 2):
            running.add_workers(joining)
            check(streamed(running, PROMPTS, max_tokens=MAX_TOKENS), texts)
            after = count(running, "request_success")
            assert [now - then for now, then in zip(after, before, strict=False)] == [500 // len(after)] * len(after)
            before[: len(after)] = after
        assert sum(count(running, "generation_tokens")) == 3 * 500 * MAX_TOKENS


def test_the_openai_client_counts_what_the_workers_count(engine: Path, tmp_path: Path) -> None:
    async def ask(running: Cluster) -> list[tuple[int, int]]:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE) as client:
            with pytest.raises(BadRequestError, match="min_tokens"):
                await client.completions.create(model=running.model, prompt="a", extra_body={"min_tokens": 2})
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


def test_aiperf_counts_what_the_workers_count(engine: Path, tmp_path: Path) -> None:
    try:
        program = find_aiperf(None)
    except MissingDependencyError as error:
        pytest.skip(f"{error.message}; {error.hint}")
    with cluster(tmp_path, engine, TARGET, "--router-mode", "kv", "--kv-cache-block-size", 32) as running:
        running.add_workers(2)
        load = AiperfLoad(
            url=running.url, model=running.model, concurrency=16, seed=1, timeout_seconds=PATIENCE,
            prompts=[Conversation(id=f"{i}", turns=(PromptTurn("user", text),)) for i, text in enumerate(PROMPTS[:64])],
            request=RequestSettings(template="completions", temperature=0, max_tokens=30, ignore_eos=True),
        )  # fmt: skip
        export = run_load(program, load, tmp_path / "aiperf", lambda _: None)
        assert export.errors == {}
        assert sum(count(running, "request_success")) == len(export.rows) == 64
        assert sum(count(running, "generation_tokens")) == sum(row.output_tokens for row in export.rows) == 64 * 30
        assert sum(count(running, "prompt_tokens")) == sum(row.input_tokens for row in export.rows)
