# SPDX-License-Identifier: Apache-2.0
"""A random schedule of requests on the mimicked worker, with its context in a dense cache or in a pool of pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.executor import AllReduce
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.session import Session
from dflash_trt.trtllm.drafter_module import EngineDrafter
from dflash_trt.trtllm.registration import rank_engine
from tests.contract.host_runtime import VERSIONS
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.decoding import open_trained
from tests.featured import featured_draft
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.trtllm.worker import Decoding, PooledWorker, Trace, Worker, draft_config, share

NAME = "tiny-gpt-oss"  # has layers with windows
BATCH, CONTEXT = 3, 150


class Setup(SimpleNamespace):
    engine: Path
    manifest: Manifest
    session: Session
    drafter: Drafter

    def worker(
        self, version: str | None = None, size: int = 32, *, pool_seed: int = 0, rank: int = 0,
        generation: str = "8d62b3e5", all_reduce: AllReduce | None = None,
    ) -> Worker:  # fmt: skip
        """With a dense cache, or a pool in the layout of a version; of ranks that share the drafter, that of one."""
        mapping = SimpleNamespace(enable_attention_dp=False, tp_size=self.manifest.num_ranks, tp_rank=rank)
        place, manifest = rank_engine(self.engine, self.manifest, mapping)
        spec = manifest.draft
        executor = TensorRTExecutor(place, manifest, HostLauncher(), all_reduce)
        module = EngineDrafter(draft_config(spec), spec, executor, in_pool=version is not None)
        share(module, self.session.target)
        sizes: dict[str, Any] = {
            "generation": generation, "max_batch": BATCH, "max_ctx": CONTEXT, "num_drafts": spec.num_draft_tokens,
        }  # fmt: skip
        if version is None:
            return Worker(module, **sizes)
        return PooledWorker(module, version=version, tokens_per_block=size, seed=pool_seed, **sizes)


def build_with_plans(engine: Path, num_ranks: int = 1) -> None:
    """Writes the fixture's engine with plans of the recorded TensorRT, on a machine that pretends to have it.

    For more ranks than KV heads, the draft gets one random KV head per rank.
    """
    draft = read_draft(FIXTURES / f"{NAME}-dflash")
    if num_ranks > draft.spec.num_key_value_heads:
        heads = {"num_attention_heads": 2 * num_ranks, "num_key_value_heads": num_ranks}
        draft = featured_draft(draft.directory, engine.parent / "draft", heads)
    target = read_target(FIXTURES / NAME)
    build_engine(BuildOptions(draft=draft, draft_name=NAME, target=target, output=engine, num_ranks=num_ranks))
    add_plans(engine, PlanOptions(max_batch_size=BATCH + 2, max_seq_len=CONTEXT, max_num_tokens=24))


def open_setup(engine: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1) -> Setup:
    """On a machine that pretends to have TensorRT from now on; builds the engine where it is not there."""
    pretend(monkeypatch, engine.parent, VERSIONS[-1])
    if not engine.exists():
        build_with_plans(engine, num_ranks)
    manifest = read_manifest(engine)
    session = open_trained(NAME, engine, max_batch_size=BATCH)
    return Setup(
        engine=engine, manifest=manifest, session=session,
        drafter=open_drafter(engine, manifest, num_slots=BATCH),
    )  # fmt: skip


def decode(setup: Setup, worker: Worker, seed: int) -> list[Trace]:
    """A random schedule: any batch and order, cancels, evictions, slots used again, prefixes of others, prompts of
    other machines, a warm-up.

    Once the worker replaces its pool and reads all running requests again. A batch of 3 is padded, since the plan has
    sizes 1, 2, 4 and 5.
    """
    draw = np.random.default_rng(seed)
    decoding = Decoding(worker, setup.session.target, setup.drafter)
    texts = [(ids * 80)[:80] for ids in prompts(setup.session)]
    ended: list[Trace] = []
    started: dict[int, list[int]] = {}
    for turn in range(14):
        free = [slot for slot in range(BATCH) if slot not in decoding.traces]
        if free and draw.random() < 0.7:
            slot, text = int(draw.choice(free)), texts[int(draw.integers(len(texts)))]
            others = [other for other in decoding.traces if other in started]
            started.pop(slot, None)
            if others and draw.random() < 0.5:  # repeats the prompt: a page of 64 and one of 16
                source = int(draw.choice(others))
                text = started[source]
                decoding.prefill(slot, text[:64], shared_with=source)
                decoding.prefill(slot, text[64:])
                started[slot] = text
            elif draw.random() < 0.2:
                decoding.prefill(slot, text, is_elsewhere=True)
            else:
                decoding.prefill(slot, text[:37])
                decoding.prefill(slot, text[37:])
                started[slot] = text
        running = [int(slot) for slot in draw.permutation(list(decoding.traces))]
        if not running:
            continue
        if turn == 5:
            taps = torch.randn(len(running) * (worker.K + 1), setup.manifest.draft.target_hidden_size)
            with torch.inference_mode():
                worker.warm_up(torch.tensor(running), taps)
        decoding.step(running[: int(draw.integers(1, len(running) + 1))])
        if turn == 8:
            worker.allocate(BATCH)
            for slot in list(decoding.traces):
                decoding.evict(slot)
        elif draw.random() < 0.2:
            decoding.evict(running[-1])
        if draw.random() < 0.3:
            slot = running[0]
            ended.append(decoding.traces.pop(slot))
            decoding.release(slot)
    ended += decoding.traces.values()
    for slot in list(decoding.traces):
        decoding.release(slot)
    return ended
