# SPDX-License-Identifier: Apache-2.0
"""The drafter in the worker's pool of pages: drafts are those of the dense cache."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dflash_trt.errors import EngineError
from dflash_trt.trtllm.worker_context import declare_pool
from tests.decoding import greedy
from tests.fixtures_data import prompts
from tests.trtllm.pool_schedule import Setup, decode, open_setup
from tests.trtllm.worker import Decoding, PooledWorker


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield open_setup(tmp_path_factory.mktemp("planned") / "engine", monkeypatch)


@pytest.mark.parametrize(
    ("version", "size", "generation"),
    [
        ("V2", 64, "864a4300"),
        *(pytest.param(*each, marks=pytest.mark.full)
          for each in (("V1", 32, "414ba69f"), ("V2", 16, "8d62b3e5"), ("V1", 16, "864a4300"))),
    ],
)  # fmt: skip
def test_drafts_are_those_of_the_dense_cache(setup: Setup, version: str, size: int, generation: str) -> None:
    """864a4300 also says where the rows of the batch's generations start."""
    workers = setup.worker(generation=generation), setup.worker(version, size, generation=generation)
    dense, pooled = (decode(setup, worker, seed=size) for worker in workers)
    assert [trace.drafts for trace in pooled] == [trace.drafts for trace in dense]
    assert [trace.token_ids for trace in pooled] == [trace.token_ids for trace in dense]
    assert sum(trace.accepted for trace in pooled) > 0


def faulty(worker: PooledWorker, fault: str) -> None:
    """Rows that each mistake in the binding would read."""
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
            bound["context_pointers"][:, 0] += layout[4]
        case "stale binding after a swap":
            new = worker.pool.clone()
            worker.pool.fill_(3)
            worker.pool, worker.views = new, [new[:, layer] for layer in range(len(worker.views))]
            worker.drafter._context.bind_pool = lambda *_: None
        case "rows beyond the length read":
            draft = worker.drafter._executor.draft
            worker.drafter._executor.draft = lambda inputs: draft(
                inputs._replace(context_lengths=inputs.context_lengths + 1)
            )
        case "another layer":
            bound["context_pointers"][:, 0] += worker.views[1].data_ptr() - worker.views[0].data_ptr()


def renew_checksums(worker: PooledWorker) -> None:
    """Makes the plugin take what it would otherwise answer with NaN."""
    bound = worker.drafter._executor._draft.tensors
    pointers, layout = bound["context_pointers"], bound["context_layout"]
    pointers[:, 1] = ~(pointers[:, 0] + layout.sum())


@pytest.mark.parametrize(
    "fault",
    [
        "entry of another request", "page size wrong", "stride of V1 under V2", "head offset by one rank",
        "another layer", "stale binding after a swap", "rows beyond the length read",
    ],
)  # fmt: skip
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
        renew_checksums(worker)
        try:
            wrong = draft()
        except (OSError, IndexError, ValueError):
            return
        assert not torch.equal(wrong, right)


def test_what_the_manager_is_told_and_what_arena_is_named(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    spec = setup.manifest.draft
    for ranks, dp, factor in ((1, False, 1), (8, False, 8), (8, True, 1)):
        config = SimpleNamespace(num_key_value_heads=spec.num_key_value_heads, sliding_window=128)
        mapping = SimpleNamespace(tp_size=ranks, enable_attention_dp=dp)
        declare_pool(SimpleNamespace(pretrained_config=config, mapping=mapping), spec)
        assert config.num_key_value_heads == factor * spec.num_key_value_heads
        assert (config.use_sliding_window, config.sliding_window) == (False, None)
        assert set(config.layer_types) == {"full_attention"}
    # One tensor of all layers: what the worker falls back to with no more than a warning
    worker = setup.worker("V1")
    assert isinstance(worker, PooledWorker)
    worker.drafter._context.bind_pool(torch.stack(worker.views), worker.table)
    assert "private context arena in the place of the managed pool" in caplog.text


def strided(view: torch.Tensor, shape: dict[int, int], strides: dict[int, int], offset: int = 0) -> torch.Tensor:
    """A layer's view of the pool with other sizes and strides of some dimensions, and another address."""
    sizes = [shape.get(axis, size) for axis, size in enumerate(view.shape)]
    sizes[0] = 1  # the pool's size does not depend on the stride
    steps = [strides.get(axis, step) for axis, step in enumerate(view.stride())]
    return view.as_strided(sizes, steps, view.storage_offset() + offset)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_what_a_pool_shows_is_refused_by_name(setup: Setup, version: str) -> None:
    """Mistakes of the worker; each error has the expected and the actual value."""
    worker = setup.worker(version)
    assert isinstance(worker, PooledWorker)
    bind, views, table = worker.drafter._context.bind_pool, worker.views, worker.table
    L, G, D, head = len(views), *views[0].shape[2::2], views[0].stride(2)
    another = {"V1": "V2", "V2": "V1"}[version]
    page = {"V1": views[0].stride(0) // L, "V2": views[0].stride(0)}[version]
    stride = {"V1": page * L, "V2": page}
    faults = {
        f"expected a pool of layers, heads and head_dim ({L}, {G}, {D})": [
            views[:-1], [view[:, :, :1] for view in views], [view.float() for view in views],
        ],
        "expected pages of 16, 32 or 64 tokens, found 20": [[view[:, :, :, :20] for view in views]],
        "expected a pool whose pages of 16 tokens have the strides": [[view[:, :, :, :16] for view in views]],
        "found (7, ": [[strided(view, {}, {0: 7}) for view in views]],
        "rows before heads": [[strided(view, {}, {2: D, 3: G * D}) for view in views]],
        "whose layers have the same strides": [[*views[:-1], strided(views[-1], {}, {0: stride[another]})]],
        "expected layers whole pages of": [
            [*views[:-1], views[0]], [views[0], *(strided(view, {}, {}, -head) for view in views[1:])],
        ],
    }  # fmt: skip
    for message, pools in faults.items():
        for layers in pools:
            with pytest.raises(EngineError) as refused:
                bind(layers, table)
            expected = "have the strides" if message == "rows before heads" else message
            assert expected in refused.value.message
    with pytest.raises(EngineError, match="expected a contiguous page table"):
        bind(views, table.long())
    with pytest.raises(EngineError, match="found none"):
        worker.drafter.dflash_forward(*[torch.zeros(1)] * 3, None, None, torch.zeros(1))


def test_a_pool_that_moves_without_a_word(setup: Setup) -> None:
    """The binding follows the views of every pass, announced or not."""
    worker, spec = setup.worker("V2"), setup.manifest.draft
    assert isinstance(worker, PooledWorker)
    with torch.inference_mode():
        worker.prefill(0, torch.randn(70, spec.target_hidden_size))
        context = worker._context(torch.arange(1))
        blocks = torch.randn(1, spec.block_size, spec.hidden_size)
        positions, lengths = torch.arange(spec.block_size).expand(1, -1) + 70, torch.full((1,), 70)
        right = worker.drafter.dflash_forward(blocks, positions, lengths, **context)
        moved = worker.pool.clone()
        shift = moved.data_ptr() - worker.pool.data_ptr()
        views = [moved.flatten().as_strided(view.shape, view.stride(), view.storage_offset()) for view in worker.views]
        assert views[0].data_ptr() - worker.views[0].data_ptr() == shift != 0
        worker.pool.fill_(3)
        context["ctx_kv_cache"] = views
        assert torch.equal(worker.drafter.dflash_forward(blocks, positions, lengths, **context), right)


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
