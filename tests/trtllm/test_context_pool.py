# SPDX-License-Identifier: Apache-2.0
"""The drafter in the worker's pool of pages: the drafts of the dense cache, whatever becomes of the pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_trt.builder.tensorrt.add_plans import add_plans
from dflash_trt.drafter.drafter import Drafter
from dflash_trt.drafter.open import open_drafter
from dflash_trt.drafter.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plan import PlanOptions
from dflash_trt.errors import EngineError
from dflash_trt.runtime.load import open_session
from dflash_trt.runtime.options import RuntimeOptions
from dflash_trt.runtime.session import Session
from dflash_trt.trtllm.context_pool import declare_pool
from dflash_trt.trtllm.drafter_module import EngineDrafter
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.contract.recorder import VERSIONS
from tests.decoding import greedy
from tests.engines import build
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.trtllm.decoding import Decoding, Trace
from tests.trtllm.pooled_worker import PooledWorker
from tests.trtllm.worker import Worker, draft_config, share

NAME = "tiny-gpt-oss"  # whose layers have windows
BATCH, CONTEXT = 3, 150


class Setup(SimpleNamespace):
    engine: Path
    manifest: Manifest
    session: Session
    drafter: Drafter

    def worker(self, version: str | None = None, size: int = 32) -> Worker:
        """With a dense cache, or a pool in the layout of a version."""
        spec = self.manifest.draft
        executor = TensorRTExecutor(self.engine, self.manifest, HostLauncher())
        module = EngineDrafter(draft_config(spec), spec, executor, in_pool=version is not None)
        share(module, self.session.target)
        sizes = {"max_batch": BATCH, "max_ctx": CONTEXT, "num_drafts": spec.num_draft_tokens}
        if version is None:
            return Worker(module, **sizes)
        return PooledWorker(module, version=version, tokens_per_block=size, **sizes)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    engine = tmp_path / "engine"
    build(FIXTURES / f"{NAME}-dflash", engine, FIXTURES / NAME)
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    add_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=CONTEXT, max_num_tokens=24))
    manifest = read_manifest(engine)
    session = open_session(engine, str(FIXTURES / NAME), RuntimeOptions(max_batch_size=BATCH))
    return Setup(
        engine=engine, manifest=manifest, session=session,
        drafter=open_drafter(engine, manifest, num_slots=BATCH),
    )  # fmt: skip


def decode(setup: Setup, worker: Worker, seed: int) -> list[Trace]:
    """A random schedule: batches of any size and order, cancels, slots used again, prefixes of others, a warm-up."""
    draw = np.random.default_rng(seed)
    decoding = Decoding(worker, setup.session.target, setup.drafter)
    texts = [(ids * 80)[:80] for ids in prompts(setup.session)]
    ended: list[Trace] = []
    started: dict[int, list[int]] = {}
    for turn in range(14):
        free = [slot for slot in range(BATCH) if slot not in decoding.traces]
        if free and draw.random() < 0.7:
            slot, text = int(draw.choice(free)), texts[int(draw.integers(len(texts)))]
            others = list(decoding.traces)
            if others and draw.random() < 0.5:  # the same prompt again: a page of 64 and one of 16
                source = int(draw.choice(others))
                text = started[source]
                decoding.prefill(slot, text[:64], shared_with=source)
                decoding.prefill(slot, text[64:])
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
        if draw.random() < 0.3:
            slot = running[0]
            ended.append(decoding.traces.pop(slot))
            decoding.release(slot)
    ended += decoding.traces.values()
    for slot in list(decoding.traces):
        decoding.release(slot)
    return ended


@pytest.mark.parametrize(("version", "size"), [("V1", 32), ("V2", 16), ("V2", 64)])
def test_drafts_are_those_of_the_dense_cache(setup: Setup, version: str, size: int) -> None:
    dense, pooled = (decode(setup, worker, seed=size) for worker in (setup.worker(), setup.worker(version, size)))
    assert [trace.drafts for trace in pooled] == [trace.drafts for trace in dense]
    assert [trace.token_ids for trace in pooled] == [trace.token_ids for trace in dense]
    assert sum(trace.accepted for trace in pooled) > 0


def test_a_pool_that_the_worker_replaces(setup: Setup) -> None:
    """Everything lies elsewhere then; who reads the old one gets what was there."""
    worker = setup.worker("V2")
    decode(setup, worker, seed=1)
    old = worker.pool, worker.table  # kept, so that the new ones lie elsewhere
    worker.allocate(BATCH)
    old[0].fill_(torch.nan)
    dense = setup.worker()
    assert [trace.drafts for trace in decode(setup, worker, seed=2)] == [
        trace.drafts for trace in decode(setup, dense, seed=2)
    ]


def faulty(worker: PooledWorker, fault: str) -> None:
    """What each mistake in the binding would read."""
    bound = worker.drafter._executor._draft.tensors
    layout = bound["context_layout"]
    match fault:
        case "entry of another request":
            worker.table[0, 0] = worker.table[1, 0]
        case "page size":
            layout[0] = 16
        case "stride of V1 under V2":
            layout[1] *= len(worker.views)
        case "head of another rank":
            bound["context_pointers"] += layout[4]
        case "another layer":
            bound["context_pointers"] += worker.views[1].data_ptr() - worker.views[0].data_ptr()


@pytest.mark.parametrize(
    "fault",
    ["entry of another request", "page size", "stride of V1 under V2", "head of another rank", "another layer"],
)
def test_a_wrong_binding_shows(setup: Setup, fault: str) -> None:
    """So that equal drafts prove that nothing of this happened."""
    worker, spec = setup.worker("V2"), setup.manifest.draft
    assert isinstance(worker, PooledWorker)
    with torch.inference_mode():
        taps = torch.randn(2, 70, spec.target_hidden_size, generator=torch.Generator().manual_seed(0))
        for slot in range(2):
            worker.prefill(slot, taps[slot])
        blocks = torch.randn(2, spec.block_size, spec.hidden_size, generator=torch.Generator().manual_seed(1))

        def draft() -> torch.Tensor:
            positions = torch.arange(spec.block_size).expand(2, -1) + 70
            lengths = torch.full((2,), 70)
            return worker.drafter.dflash_forward(blocks, positions, lengths, **worker._context(torch.arange(2)))

        right = draft()
        assert torch.equal(draft(), right)
        context = worker._context(torch.arange(2))
        worker._context = lambda slots: context  # type: ignore[method-assign]
        worker.pool[worker.pool.isnan()] = 3  # elsewhere there is something
        faulty(worker, fault)
        try:
            wrong = draft()
        except (OSError, IndexError, ValueError):
            return
        assert not torch.equal(wrong, right)


def test_what_the_manager_is_told(setup: Setup) -> None:
    spec = setup.manifest.draft
    for ranks, dp, factor in ((1, False, 1), (8, False, 8), (8, True, 1)):
        config = SimpleNamespace(num_key_value_heads=spec.num_key_value_heads, sliding_window=128)
        mapping = SimpleNamespace(tp_size=ranks, enable_attention_dp=dp)
        declare_pool(SimpleNamespace(pretrained_config=config, mapping=mapping), spec)
        assert config.num_key_value_heads == factor * spec.num_key_value_heads
        assert (config.use_sliding_window, config.sliding_window) == (False, None)
        assert set(config.layer_types) == {"full_attention"}


def test_a_private_arena_is_read_and_named(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """One tensor of all layers: what the worker falls back to with no more than a warning."""
    worker = setup.worker("V1")
    assert isinstance(worker, PooledWorker)
    worker.drafter._pool.bind(torch.stack(worker.views), worker.table)
    assert "private context arena in the place of the managed pool" in caplog.text


def test_refusals(setup: Setup) -> None:
    worker = setup.worker("V2")
    assert isinstance(worker, PooledWorker)
    bind, views, table = worker.drafter._pool.bind, worker.views, worker.table
    for layers, found, message in (
        (views[:-1], table, "expected a pool of"),
        ([view[:, :, :1] for view in views], table, "expected a pool of"),
        ([view.float() for view in views], table, "expected a pool of"),
        ([view[:, :, :, :20] for view in views], table, "expected pages of 16, 32 or 64 tokens, found 20"),
        (
            [*views[:-1], views[-1].clone()[:, :, ::2].repeat(1, 1, 2, 1, 1)[..., ::1].mT.contiguous().mT],
            table,
            "same strides",
        ),
        (views, table.long(), "expected a contiguous page table"),
    ):
        with pytest.raises(EngineError, match=message):
            bind(layers, found)
    bind(views, table)
    with pytest.raises(EngineError, match="slots, for which the plan was built"):
        bind(views, table.view(-1, 1))  # at the address of the bound one
    with pytest.raises(EngineError, match="found none"):
        worker.drafter.dflash_forward(*[torch.zeros(1)] * 3, None, None, torch.zeros(1))


def test_decoding_in_the_pool_is_lossless(setup: Setup) -> None:
    worker = setup.worker("V1")
    decoding = Decoding(worker, setup.session.target, setup.drafter)
    text = prompts(setup.session)[0][:70]
    decoding.prefill(0, text)
    for _ in range(8):
        decoding.step([0])
    token_ids = decoding.traces[0].token_ids
    decoding.release(0)
    assert token_ids == setup.session.generate_plain(text, greedy(len(token_ids))).token_ids
