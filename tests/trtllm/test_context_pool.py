# SPDX-License-Identifier: Apache-2.0
"""The drafter in the worker's pool of pages: the drafts of the dense cache, whatever becomes of the pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_trt.errors import EngineError
from dflash_trt.trtllm.context_pool import declare_pool
from tests.decoding import greedy
from tests.fixtures_data import prompts
from tests.trtllm.decoding import Decoding
from tests.trtllm.pool_schedule import BATCH, Setup, decode, open_setup
from tests.trtllm.pooled_worker import PooledWorker


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return open_setup(tmp_path / "engine", monkeypatch)


@pytest.mark.parametrize(
    ("version", "size", "generation"),
    [("V1", 32, "414ba69f"), ("V2", 16, "8d62b3e5"), ("V2", 64, "864a4300"), ("V1", 16, "864a4300")],
)
def test_drafts_are_those_of_the_dense_cache(setup: Setup, version: str, size: int, generation: str) -> None:
    """864a4300 also says where the rows of the batch's generations start."""
    workers = setup.worker(generation=generation), setup.worker(version, size, generation=generation)
    dense, pooled = (decode(setup, worker, seed=size) for worker in workers)
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
            worker.table[worker._start, 0] = worker.table[worker._start + 1, 0]
        case "page size wrong":
            layout[0] = 16
        case "stride of V1 under V2":
            layout[1] *= len(worker.views)
        case "head offset by one rank":
            bound["context_pointers"] += layout[4]
        case "stale binding after a swap":
            new = worker.pool.clone()
            worker.pool.fill_(3)
            worker.pool, worker.views = new, [new[:, layer] for layer in range(len(worker.views))]
            worker.drafter._pool.bind = lambda *_: None
        case "rows beyond the length read":
            draft = worker.drafter._executor.draft
            worker.drafter._executor.draft = lambda inputs: draft(
                inputs._replace(context_lengths=inputs.context_lengths + 1)
            )
        case "another layer":
            bound["context_pointers"] += worker.views[1].data_ptr() - worker.views[0].data_ptr()


@pytest.mark.parametrize(
    "fault",
    [
        "entry of another request",
        "page size wrong",
        "stride of V1 under V2",
        "head offset by one rank",
        "another layer",
        "stale binding after a swap",
        "rows beyond the length read",
    ],
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
