# SPDX-License-Identifier: Apache-2.0
"""The drafter module under the worker's calls: the drafts of our own runtime, and the target's own tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.device import launcher
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.errors import EngineError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import choose_executor, open_drafter
from dflash_trt.runtime.session import Session
from dflash_trt.trtllm.drafter_module import EngineDrafter
from dflash_trt.trtllm.registration import DISTRIBUTED, build_draft_model
from tests.checkpoint.dialect_samples import write_dspark
from tests.contract.drafter_contract import contract_data
from tests.contract.host_runtime import VERSIONS
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.decoding import greedy, open_trained
from tests.engines import build
from tests.featured import build_featured, featured_draft
from tests.fixtures_data import PAIRS, prompts
from tests.paths import FIXTURES
from tests.trtllm.fake_package import GENERATIONS
from tests.trtllm.pool_schedule import build_with_plans
from tests.trtllm.worker import Decoding, Trace, Worker, decode, draft_config, engine_of, model_config, share

STEPS = 8
BATCH, CONTEXT, ROWS = 3, 240, 24
ONE_PAIR = pytest.mark.parametrize("session", PAIRS[:1], indirect=True)


@pytest.fixture(scope="module", params=PAIRS)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    engine = tmp_path_factory.mktemp(request.param) / "engine"
    build(FIXTURES / f"{request.param}-dflash", engine, FIXTURES / request.param)
    return open_trained(request.param, engine, max_batch_size=BATCH)


def make_worker(
    session: Session, executor: Executor, num_drafts: int | None = None, generation: str = "414ba69f"
) -> Worker:
    spec = session.manifest.draft
    drafter = EngineDrafter(draft_config(spec), spec, executor)
    share(drafter, session.target)
    return Worker(
        drafter, max_batch=BATCH, max_ctx=CONTEXT, num_drafts=num_drafts or spec.num_draft_tokens, generation=generation
    )


def texts(session: Session) -> list[list[int]]:
    return [ids[:90] for ids in prompts(session)[:BATCH]]


def check(session: Session, traces: list[Trace]) -> None:
    for prompt, trace in zip(texts(session), traces, strict=True):
        plain = session.generate_plain(prompt, greedy(len(trace.token_ids))).token_ids
        assert trace.token_ids == plain
        assert trace.drafts == trace.expected_drafts
    assert sum(trace.accepted for trace in traces) > STEPS  # drafts that nothing accepts would prove nothing


@pytest.fixture
def engine(session: Session, tmp_path: Path) -> Path:
    """A directory of its own, because plans are added to it."""
    return copytree(engine_of(session), tmp_path / "engine")


@pytest.mark.parametrize(
    ("session", "generation", "num_drafts"),
    [
        (PAIRS[0], "414ba69f", 2), (PAIRS[1], "864a4300", None),
        *(pytest.param(PAIRS[0], name, None, marks=pytest.mark.full) for name in GENERATIONS),
    ],
    indirect=["session"],
)  # fmt: skip
def test_drafts_are_our_own_runtimes(session: Session, engine: Path, generation: str, num_drafts: int | None) -> None:
    """The drafter sees whole blocks even where the worker verifies fewer drafts."""
    worker = make_worker(session, OnnxExecutor(engine, session.manifest), num_drafts, generation)
    drafter = open_drafter(engine, session.manifest, num_slots=BATCH)
    assert not worker.drafter.has_drafted
    check(session, decode(worker, session.target, drafter, texts(session), STEPS))
    assert worker.drafter.has_drafted


@ONE_PAIR
def test_a_block_that_the_worker_cuts_is_whole_to_the_drafter(session: Session, engine: Path) -> None:
    """Drafts alone would not reveal other masks after its end."""
    worker, spec = make_worker(session, OnnxExecutor(engine, session.manifest)), session.manifest.draft
    with torch.inference_mode():
        worker.prefill(0, torch.randn(20, spec.target_hidden_size))
        noise = session.target.embed(torch.tensor([[5, *[spec.mask_token_id] * (spec.block_size - 1)]]))
        positions, context = torch.arange(spec.block_size)[None] + 20, worker._context(torch.tensor([0]))
        whole, cut = (
            worker.drafter.dflash_forward(noise[:, :W], positions[:, :W], torch.tensor([20]), **context)
            for W in (spec.block_size, 3)
        )
    assert torch.equal(cut, whole[:3])


@ONE_PAIR
def test_the_workers_hidden_states_outlive_the_next_block(session: Session, engine: Path) -> None:
    worker, spec = make_worker(session, OnnxExecutor(engine, session.manifest)), session.manifest.draft
    positions, context = torch.arange(spec.block_size)[None], worker._context(torch.tensor([0]))
    first, second = torch.randn(2, 1, spec.block_size, spec.hidden_size)
    hidden = worker.drafter.dflash_forward(first, positions, torch.tensor([0]), **context)
    kept = hidden.clone()
    other = worker.drafter.dflash_forward(second, positions, torch.tensor([0]), **context)
    assert torch.equal(hidden, kept)
    assert not torch.equal(other, kept)


@ONE_PAIR
def test_requests_whose_prompt_is_not_there(session: Session, engine: Path) -> None:
    """One outgrows the context in its last chunk, one was prefilled elsewhere; both draft from their answers alone."""
    worker = make_worker(session, OnnxExecutor(engine, session.manifest))
    decoding = Decoding(worker, session.target, open_drafter(engine, session.manifest, num_slots=BATCH))
    long = (texts(session)[0] * 9)[: CONTEXT + 1]
    asked = [long, *texts(session)[1:]]
    decoding.prefill(0, long[:200])
    decoding.prefill(0, long[200:])
    decoding.prefill(1, asked[1], is_elsewhere=True)
    decoding.prefill(2, asked[2])
    assert worker.ctx_len.tolist() == [0, 0, len(asked[2]), 0]
    for _ in range(STEPS):
        decoding.step([1, 2, 0])
    for slot in range(BATCH):
        decoding.release(slot)
    for slot, prompt in enumerate(asked):
        trace = decoding.traces[slot]
        assert trace.token_ids == session.generate_plain(prompt, greedy(len(trace.token_ids))).token_ids
        assert trace.drafts == trace.expected_drafts


@ONE_PAIR
def test_a_context_at_its_end(session: Session, engine: Path) -> None:
    """Rows that no longer fit are stored over the last; the drafts are poor then, and tokens are the target's."""
    worker = make_worker(session, OnnxExecutor(engine, session.manifest))
    worker.max_ctx = max(map(len, texts(session))) + 5
    worker.allocate(BATCH)
    traces = decode(worker, session.target, open_drafter(engine, session.manifest, num_slots=BATCH), texts(session), 12)
    assert any(
        len(prompt + t.token_ids) > worker.max_ctx + worker.K for prompt, t in zip(texts(session), traces, strict=True)
    )
    for prompt, trace in zip(texts(session), traces, strict=True):
        assert trace.token_ids == session.generate_plain(prompt, greedy(len(trace.token_ids))).token_ids


@ONE_PAIR
def test_a_cache_that_the_worker_replaces(session: Session, engine: Path) -> None:
    worker = make_worker(session, OnnxExecutor(engine, session.manifest))
    drafter = open_drafter(engine, session.manifest, num_slots=BATCH)
    decode(worker, session.target, drafter, texts(session), 2)
    worker.allocate(BATCH)
    check(session, decode(worker, session.target, drafter, texts(session), STEPS))


@pytest.mark.parametrize(
    ("session", "num_drafts"),
    [(PAIRS[1], None), *(pytest.param(name, 2, marks=pytest.mark.full) for name in PAIRS)],
    indirect=["session"],
)
def test_requests_that_come_and_go(session: Session, engine: Path, num_drafts: int | None) -> None:
    """Chunks of one prompt between the steps of others, a warm-up that is rolled back, a slot that is used again."""
    worker = make_worker(session, OnnxExecutor(engine, session.manifest), num_drafts)
    drafter = open_drafter(engine, session.manifest, num_slots=BATCH)
    first, second, third = texts(session)
    decoding = Decoding(worker, session.target, drafter)
    decoding.prefill(0, first)
    for begin in range(0, len(second), 8):  # while the first steps alone
        decoding.prefill(1, second[begin : begin + 8])
        decoding.step([0])
    taps = torch.randn(2 * (worker.K + 1), session.manifest.draft.target_hidden_size)
    with torch.inference_mode():
        worker.warm_up(torch.tensor([0, 1]), taps)
    decoding.step([1, 0])
    ended = decoding.traces.pop(0)
    decoding.release(0)
    decoding.prefill(0, third[:5])
    decoding.prefill(0, third[5:])
    for _ in range(STEPS):
        decoding.step([0, 1])
    traces = [ended, decoding.traces[1], decoding.traces[0]]
    for slot in (0, 1):
        decoding.release(slot)
    check(session, traces)


@ONE_PAIR
def test_one_cache_is_held_where_the_worker_replaces_it(
    session: Session, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the swap one arena, in it one and a half: what the worker itself holds, and nothing of ours."""
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    room = CONTEXT + session.manifest.draft.block_size
    manifest = with_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=room, max_num_tokens=ROWS))
    drafter = open_drafter(engine, session.manifest, num_slots=BATCH)
    for executor in (TensorRTExecutor(engine, manifest, HostLauncher()), OnnxExecutor(engine, session.manifest)):
        worker = make_worker(session, executor)
        arena = worker.k_cache.nbytes + worker.v_cache.nbytes
        decode(worker, session.target, drafter, texts(session)[:1], 2)
        assert worker.cache_bytes() == worker.peak_bytes == arena
        worker.allocate(BATCH)
        assert worker.cache_bytes() == arena
        assert worker.peak_bytes == 1.5 * arena
        decode(worker, session.target, drafter, texts(session)[:1], 2)
        assert worker.cache_bytes() == arena


@ONE_PAIR
def test_the_drafter_has_what_the_contract_says_it_has(session: Session, engine: Path) -> None:
    """All but what the worker sets; of a mask row of its own it says that there is none, as Kimi-K3's worker asks."""
    drafter = make_worker(session, OnnxExecutor(engine, session.manifest)).drafter
    groups = {
        name: {use.partition(".")[0].partition("(")[0] for use in uses} for name, uses in contract_data().uses.items()
    }
    ours = {name for name in groups.pop("ours") if " " not in name}
    assert {name for name in ours if not hasattr(drafter, name)} == {"_runtime_position_ceiling"}
    never: set[str] = set().union(*groups.values()) - ours
    assert {name for name in never if hasattr(drafter, name)} == {"mask_token_embedding"}
    assert drafter.mask_token_embedding is None


def with_plans(engine: Path, options: PlanOptions) -> Manifest:
    add_plans(engine, options)
    return read_manifest(engine)


def test_plans_on_the_recorded_tensorrt(
    session: Session, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans' shapes, padding and parts (BATCH + 1 blocks); ONNX Runtime computes, inputs and outputs in BF16."""
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    spec = session.manifest.draft
    room = CONTEXT + spec.block_size
    manifest = with_plans(engine, PlanOptions(max_batch_size=BATCH, max_seq_len=room, max_num_tokens=ROWS))
    worker = make_worker(session, TensorRTExecutor(engine, manifest, HostLauncher()))
    drafter = open_drafter(engine, session.manifest, num_slots=BATCH)
    traces = decode(worker, session.target, drafter, texts(session), STEPS)
    for prompt, trace in zip(texts(session), traces, strict=True):
        assert trace.token_ids == session.generate_plain(prompt, greedy(len(trace.token_ids))).token_ids
    pairs = [
        (found, expected)
        for trace in traces
        for ours, theirs in zip(trace.drafts, trace.expected_drafts, strict=True)
        for found, expected in zip(ours, theirs, strict=True)
    ]
    assert sum(found == expected for found, expected in pairs) > 0.95 * len(pairs)
    assert worker.k_cache.dtype == torch.bfloat16


@ONE_PAIR
def test_padding_reads_nothing(session: Session, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an earlier, larger batch in the padding would be read needlessly."""
    host = pretend(monkeypatch, tmp_path, VERSIONS[-1])
    spec = session.manifest.draft
    manifest = with_plans(engine, PlanOptions(max_batch_size=4, max_seq_len=CONTEXT, max_num_tokens=ROWS))
    executor = TensorRTExecutor(engine, manifest, HostLauncher())
    executor.load()
    shape = (4, len(spec.layers), CONTEXT, spec.num_key_value_heads, spec.head_dim)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in "kv"]
    executor.bind(*caches)
    for B in (4, 3):
        blocks = torch.zeros(B, spec.block_size, spec.hidden_size, dtype=torch.bfloat16)
        positions = torch.zeros(B, spec.block_size, dtype=torch.long)
        executor.draft(DraftInputs(blocks, positions, torch.arange(B)[:, None], torch.full((B,), 5)))
    feed = host.feeds[-1]
    assert feed["context_lengths"].tolist() == [5, 5, 5, 0]
    assert feed["page_table"].tolist() == [[0], [1], [2], [3]]
    assert feed["slot_ids"].tolist() == [0, 1, 2, 3]


@ONE_PAIR
def test_refusals(session: Session, engine: Path) -> None:
    worker = make_worker(session, OnnxExecutor(engine, session.manifest))
    bind = worker.drafter._context.bind_caches
    with pytest.raises(EngineError, match="a context cache of layers, heads and head_dim"):
        bind(*[torch.zeros(1, 1, 8, 1, 4)] * 2)
    spec = session.manifest.draft
    shape = (2, spec.num_layers, spec.num_key_value_heads, 8, spec.head_dim)
    cache = torch.zeros(shape, dtype=worker.drafter.fc.weight.dtype).transpose(2, 3)
    with pytest.raises(EngineError, match="expected K and V of the same shape and strides"):
        bind(cache, cache.contiguous())


@ONE_PAIR
def test_plans_of_another_tensorrt_are_refused(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the drafter is made, before the target's weights are read."""
    monkeypatch.setattr(launcher, "CurrentStreamLauncher", HostLauncher)
    arguments = (model_config(engine), SimpleNamespace(pretrained_config=None), None, None)
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    with_plans(engine, PlanOptions(max_batch_size=1, max_seq_len=32, max_num_tokens=16))
    assert build_draft_model(*arguments).block_size
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    with pytest.raises(EngineError, match=f"with TensorRT {VERSIONS[0]}: .* with TensorRT {VERSIONS[-1]}") as refused:
        build_draft_model(*arguments)
    assert refused.value.hint == f"rebuild: dflash-trt build --plans-for {engine}"


@ONE_PAIR
def test_pipeline_stages_are_refused(engine: Path) -> None:
    with pytest.raises(EngineError, match="expected pipeline_parallel_size 1, found 2") as refused:
        build_draft_model(model_config(engine, pp_size=2), None, None, None)
    assert "tensor_parallel_size" in refused.value.hint


class AllReduce:
    """TensorRT-LLM's, for ranks that all have the same partial sums."""

    def __init__(self, mapping: SimpleNamespace) -> None:
        self._ranks = mapping.tp_size

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        assert partial.ndim == 2
        return self._ranks * partial


def test_each_rank_has_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank builds its shard, with TensorRT-LLM's all-reduce; other numbers of ranks are refused."""
    monkeypatch.setattr(launcher, "CurrentStreamLauncher", HostLauncher)
    monkeypatch.setitem(sys.modules, DISTRIBUTED, SimpleNamespace(AllReduce=AllReduce))
    pretend(monkeypatch, tmp_path, VERSIONS[-1])
    engine = tmp_path / "engine"
    build_with_plans(engine, 2)

    def drafter(directory: Path = engine, tp_size: int = 2, *, dp: bool = False) -> Any:
        ranks = {"tp_size": tp_size, "tp_rank": 1, "enable_attention_dp": dp}
        config = model_config(directory, attention_backend="TRTLLM", **ranks)
        draft_config = SimpleNamespace(pretrained_config=SimpleNamespace(), mapping=config.mapping)
        return build_draft_model(config, draft_config, None, None)

    second = drafter()
    assert (second._num_heads, second._num_kv_heads) == (2, 1)
    assert second.config.num_key_value_heads == 2  # the manager divides them among the ranks
    assert second._executor._directory == engine / "rank1"
    partial = torch.ones(12, 5)
    second._executor._all_reduce(partial)
    assert torch.equal(partial, torch.full((12, 5), 2.0))
    with pytest.raises(EngineError, match="found one shared by 2") as refused:
        drafter(tp_size=4)
    assert "--tp 4" in str(refused.value.hint)
    with pytest.raises(EngineError, match="expected a whole drafter for attention by data parallelism"):
        drafter(dp=True)
    with pytest.raises(EngineError, match="rank1 is only rank 1 of 2 of a drafter") as refused:
        choose_executor(engine / "rank1", read_manifest(engine / "rank1"))
    assert str(refused.value.hint).endswith(str(engine))
    monkeypatch.setitem(sys.modules, DISTRIBUTED, SimpleNamespace(AllReduce=lambda world: None))
    with pytest.raises(EngineError, match=r"AllReduce: expected it to take a mapping, found \(world\)"):
        drafter()
    with pytest.raises(EngineError, match="expected the engine of all ranks, found the part of rank 1 of 2") as refused:
        drafter(engine / "rank1")
    assert str(refused.value.hint).endswith(str(engine))


def test_drafts_that_the_worker_cannot_serve_are_refused(tmp_path: Path) -> None:
    """The worker would take the target's head in the place of a draft's own, and say nothing."""
    draft, target = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"
    own_head = featured_draft(draft, tmp_path / "head-draft", {"draft_vocab_size": 1024, "own_embedding": True})
    build_featured(own_head, tmp_path / "head", target)
    build(write_dspark(tmp_path / "dspark-draft"), tmp_path / "dspark")
    quantize_checkpoint(read_draft(draft), load_recipe("bf16+fp8-kv"), tmp_path / "fp8-draft")
    build(tmp_path / "fp8-draft", tmp_path / "fp8", target)
    for engine, message in (
        ("head", "found embed_tokens and lm_head"),
        ("dspark", "found DSpark, whose block, or Markov head, that worker does not"),
        ("fp8", "BF16 context cache for engine mode, found FP8"),
    ):
        with pytest.raises(EngineError, match=message):
            build_draft_model(model_config(tmp_path / engine), None, None, None)
