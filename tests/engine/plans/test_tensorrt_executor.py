# SPDX-License-Identifier: Apache-2.0
"""A drafter on plans against one on ONNX Runtime, which computes for both: padding, parts and order of calls."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.executor import DraftInputs
from dflash_trt.engine.manifest import Manifest, read_manifest, read_shard
from dflash_trt.engine.plans import jit_cache, machine
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.plan_runner import PlanRunner
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import BuildError, EngineError, MissingDependencyError, RequestError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.onnxruntime import lowering
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.session import run
from tests.checkpoint.samples import refusal
from tests.contract.host_runtime import RTX, VERSIONS, HostRuntime, offer_of
from tests.contract.launcher import HostLauncher
from tests.contract.machine import B300, H200, RTX_5090, another_plugin, pretend
from tests.decoding import greedy, hidden_of, open_trained
from tests.engine.plans.test_preview import planned_drafter
from tests.engines import build
from tests.featured import build_featured, featured_draft
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.runtime.batches import check_shared_pages
from tests.waiting import PATIENCE

OPTIONS = PlanOptions(max_batch_size=5, max_seq_len=96, max_num_tokens=40)
DRAFT, TARGET = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"


EACH = pytest.mark.parametrize(("recipe", "host"), [("bf16", VERSIONS[-1]), ("fp8+fp8-kv", RTX)], indirect=True)
"""Both runtimes and both types of cache."""
ON_RTX = pytest.mark.parametrize("host", [RTX], indirect=True)


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "bf16"))


@pytest.fixture(scope="module")
def built(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    source = DRAFT
    if recipe != "bf16":
        source = directory / "checkpoint"
        quantize_checkpoint(read_draft(DRAFT), load_recipe(recipe), source)
    build(source, directory / "engine", TARGET)
    return directory / "engine"


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostRuntime:
    version = getattr(request, "param", VERSIONS[-1])
    return pretend(monkeypatch, tmp_path, version, *gpu_for(version))


def gpu_for(version: str) -> list[Gpu]:
    return [RTX_5090] if version == RTX else [H200]


@pytest.fixture
def manifest(built: Path, host: HostRuntime) -> Manifest:
    for file in built.glob("*.jit"):
        file.unlink()
    add_plans(built, options_for(host))
    return read_manifest(built)


def options_for(host: HostRuntime) -> PlanOptions:
    return OPTIONS.changed(runtime="tensorrt_rtx") if host.__version__ == RTX else OPTIONS


def drafters(built: Path, manifest: Manifest) -> tuple[Drafter, Drafter]:
    ours = planned_drafter(built, manifest, num_slots=3)
    return ours, open_drafter(built, manifest, num_slots=3)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within what rounding inputs and outputs to BF16 costs; a wrong row would be off by its whole size."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.03


@pytest.fixture
def random() -> Callable[..., torch.Tensor]:
    """Values that BF16 holds."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).bfloat16().float()


@EACH
def test_ragged_steps_as_onnx_runtime(
    built: Path, manifest: Manifest, random: Callable[..., torch.Tensor], uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Slots grow at their own pace, prompts are longer than one call, a released slot starts anew."""
    plans, init = weakref.WeakSet[PlanRunner](), PlanRunner.__init__

    def noted(self: PlanRunner, *args: Any, **others: Any) -> None:
        init(self, *args, **others)
        plans.add(self)

    monkeypatch.setattr(PlanRunner, "__init__", noted)
    ours, theirs = drafters(built, manifest)
    spec = manifest.draft
    for slots, num_rows in (([0, 2], [5, 61]), ([1], [1]), ([2, 0, 1], [1, 8, 3])):
        taps = random(sum(num_rows), spec.target_hidden_size)
        for drafter in (ours, theirs):
            drafter.inject(slots, num_rows, taps)
        blocks = random(len(slots), spec.block_size, spec.hidden_size)
        assert close(hidden_of(ours, slots, blocks), hidden_of(theirs, slots, blocks))
        for drafter in (ours, theirs):
            drafter.release(1)
    blocks = random(1, spec.block_size, spec.hidden_size)
    assert close(hidden_of(ours, [1], blocks), hidden_of(theirs, [1], blocks))
    assert not close(hidden_of(ours, [0], blocks), hidden_of(theirs, [1], blocks))
    assert len(plans) == 2
    ours.close()
    assert not plans


def test_proposals_of_a_draft_with_its_own_head(
    tmp_path: Path, host: HostRuntime, random: Callable[..., torch.Tensor]
) -> None:
    """One pass returns them, in parts where the batch is larger than a plan."""
    draft = featured_draft(DRAFT, tmp_path / "draft", {"draft_vocab_size": 1024})
    build_featured(draft, tmp_path / "engine", TARGET)
    add_plans(tmp_path / "engine", options_for(host))
    ours, theirs = drafters(tmp_path / "engine", read_manifest(tmp_path / "engine"))
    slots, blocks = [0, 1, 2, 0, 1, 2, 0], random(7, draft.spec.block_size, draft.spec.hidden_size)
    taps = random(6, draft.spec.target_hidden_size)
    for drafter in (ours, theirs):
        drafter.inject([0, 2], [4, 2], taps)
    found, expected = ours.run(slots, blocks), theirs.run(slots, blocks)
    assert found["token_ids"].shape == (7, draft.spec.num_draft_tokens)
    assert (found["token_ids"] == expected["token_ids"]).float().mean() > 0.95  # BF16 may decide between two equals
    assert close(found["hidden"], expected["hidden"])


@EACH
def test_decoding_is_lossless_and_as_short(built: Path, manifest: Manifest) -> None:
    session = open_trained(TARGET.name, built, max_batch_size=1)
    ours = planned_drafter(built, manifest)
    prompt = prompts(session)[0][:32]
    plain = session.generate_plain(prompt, greedy(40))
    theirs = session.generate(prompt, greedy(40))
    completion = session.with_drafter(manifest, ours).generate(prompt, greedy(40))
    assert completion.token_ids == plain.token_ids
    assert abs(completion.steps - theirs.steps) <= 2
    assert completion.steps < plain.steps


def test_a_prompt_begins_with_what_an_earlier_one_left(built: Path, manifest: Manifest) -> None:
    """In pages that another slot wrote, it gives the same tokens in the same number of steps."""
    session = open_trained(TARGET.name, built, max_batch_size=2)
    planned = session.with_drafter(manifest, planned_drafter(built, manifest, num_slots=2))
    assert len(check_shared_pages(planned, prompts(session)[0])) < 12


def test_kept_prefixes_stay_in_the_pages_of_the_plan(built: Path, manifest: Manifest) -> None:
    """The caches may hold more than a plan's: then the prefixes of earlier prompts make room."""
    session = open_trained(TARGET.name, built, max_batch_size=1)
    planned = session.with_drafter(manifest, planned_drafter(built, manifest))
    decoder = planned.decoder(prefix_caching=True)
    for prompt in prompts(session)[:5]:
        (completion,) = run(decoder, [planned.request(prompt[:64], greedy(4))])
        assert completion.token_ids == session.generate_plain(prompt[:64], greedy(4)).token_ids
        assert planned.drafter.cache.table.num_pages <= len(planned.drafter.cache.k)


def test_beyond_the_rows_of_the_plan_the_target_goes_on_alone(built: Path, manifest: Manifest) -> None:
    session = open_trained(TARGET.name, built, max_batch_size=2)
    planned = session.with_drafter(manifest, planned_drafter(built, manifest, num_slots=2))
    prompt, alone = prompts(session)[0][:32], 40
    count = 96 - len(prompt) + alone
    plain = session.generate_plain(prompt, greedy(count))
    completion = planned.generate(prompt, greedy(count))
    assert (completion.token_ids, planned.drafter.max_rows) == (plain.token_ids, 96)
    assert alone <= completion.steps < plain.steps
    message = refusal(lambda: planned.generate(prompt, greedy(200)), RequestError)
    assert "192 tokens, which is what the draft's plans hold" in message


@EACH
def test_one_launch_a_call_and_everything_bound_once(built: Path, manifest: Manifest, host: HostRuntime) -> None:
    launcher = HostLauncher()
    drafter = planned_drafter(built, manifest, launcher, num_slots=3)
    spec = manifest.draft
    bound = len(host.arguments("IExecutionContext.set_tensor_address"))
    profiles = [len(plan.profiles) for plan in manifest.plans.values()]
    assert profiles == [2, 4]  # T 16, 40; B 1, 2, 4, 5
    for version in VERSIONS if host.__version__ in VERSIONS else ():  # no call that only the newest has
        offer = offer_of(version)["classes"]
        used = {tuple(name.split(".")) for name, _ in host.calls if "." in name}
        assert all(method in {**offer[owner]["methods"], "__init__": 0} for owner, method in used)
    assert bound == 2 * 3 + 4 * 8
    assert len(host.arguments("ICudaEngine.create_execution_context")) == sum(profiles)
    memories = {arguments[0] for arguments in host.arguments("IExecutionContext.set_device_memory")}
    assert len(memories) == 2  # contexts of a plan share their workspace

    drafter.inject([0], [17], torch.randn(17, spec.target_hidden_size))
    drafter.run([0, 1], torch.randn(2, spec.block_size, spec.hidden_size))
    assert launcher.launches == 2
    assert len(host.arguments("IExecutionContext.set_tensor_address")) == bound
    assert {stream for (stream,) in host.arguments("IExecutionContext.execute_async_v3")} == {launcher.handle}
    assert any(built.glob("*.jit")) == (host.__version__ == RTX)


@ON_RTX
def test_tensorrt_rtx_compiles_once(
    built: Path, host: HostRuntime, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Kernels stay beside the plans for the next start, for this GPU and driver, until a plan is built again."""
    planned_drafter(built, manifest)
    files = [f"{graph}.plan.nvidia-geforce-rtx-5090-13.0.jit" for graph in ("context", "draft")]
    assert (
        host.arguments("IRuntimeConfig.set_execution_context_allocation_strategy")
        == [(host.ExecutionContextAllocationStrategy.USER_MANAGED,)] * 2
    )
    assert host.arguments("IRuntimeConfig.cuda_graph_strategy") == [(host.CudaGraphStrategy.DISABLED,)] * 2
    eager = host.DynamicShapesKernelSpecializationStrategy.EAGER
    assert host.arguments("IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy") == [(eager,)] * 2
    assert len(host.arguments("IExecutionContext.is_stream_capturable")) == 6
    assert host.compiled == ["context.onnx", "draft.onnx"]
    assert sorted(file.name for file in built.glob("*.jit")) == files
    assert read_manifest(built) == manifest

    again = pretend(monkeypatch, tmp_path, RTX, RTX_5090)
    planned_drafter(built, manifest)
    assert again.compiled == []
    (built / files[1]).write_bytes(b"of another driver")
    again = pretend(monkeypatch, tmp_path, RTX, RTX_5090)
    planned_drafter(built, manifest)
    assert again.compiled == ["draft.onnx"]
    assert "draft.plan.nvidia-geforce-rtx-5090-13.0.jit: compiled for another GPU" in caplog.text
    assert (built / files[1]).read_bytes() == b"kernels of draft.onnx"

    add_plans(built, OPTIONS.changed(runtime="tensorrt_rtx", max_batch_size=4))
    assert [file.name for file in built.glob("*.jit")] == files[:1]


@ON_RTX
def test_a_cache_that_cannot_be_kept(
    built: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, **others: object) -> None:
        raise BuildError("engine: read-only file system")

    monkeypatch.setattr(jit_cache, "new_file", refuse)
    planned_drafter(built, manifest)
    assert "read-only file system; kernels are compiled at every start" in caplog.text
    assert not list(built.glob("*.jit"))


def test_padded_rows_read_no_context(built: Path, manifest: Manifest, host: HostRuntime) -> None:
    """Three blocks run as four; what the last row held before is gone."""
    drafter = planned_drafter(built, manifest, num_slots=4)
    spec = manifest.draft
    drafter.inject([0, 1, 2, 3], [9, 8, 7, 6], torch.randn(30, spec.target_hidden_size))
    drafter.run([0, 1, 2, 3], torch.randn(4, spec.block_size, spec.hidden_size))
    drafter.run([3, 2, 1], torch.randn(3, spec.block_size, spec.hidden_size))
    feed = host.feeds[-1]
    assert feed["context_lengths"].tolist() == [6, 7, 8, 0]
    assert feed["slot_ids"].tolist() == [0, 1, 2, 3]
    assert feed["page_table"][:3, 0].tolist() == [drafter.cache.table.pages[slot][0] for slot in (3, 2, 1)]


def test_ranks_add_up_the_rows_of_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random: Callable[..., torch.Tensor]
) -> None:
    """Two ranks on plans of NVFP4, whose rows are filled up to 128, are the whole drafter: 3 blocks run as 4."""
    pretend(monkeypatch, tmp_path, VERSIONS[-1], B300)
    monkeypatch.setattr(lowering, "leave_out_padding", lambda graph: None)
    engine, B = tmp_path / "engine", 3
    quantize_checkpoint(read_draft(DRAFT), load_recipe("nvfp4"), tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", engine, TARGET, num_ranks=2)
    whole, spec = add_plans(engine, OPTIONS), read_draft(DRAFT).spec
    lengths = torch.tensor([9, 0, 17])
    positions = lengths[:, None] + torch.arange(spec.block_size)
    block = DraftInputs(random(B, spec.block_size, spec.hidden_size), positions, torch.arange(B)[:, None], lengths)
    caches = random(2, B, spec.num_layers, TOKENS_PER_PAGE, spec.num_key_value_heads, spec.head_dim)
    parts, barrier = [torch.empty(0)] * 2, threading.Barrier(2, timeout=PATIENCE)

    def hidden_of(rank: int) -> torch.Tensor:
        def add_up(partial: torch.Tensor) -> None:
            assert partial.shape == (4 * spec.block_size, spec.hidden_size)
            parts[rank] = partial.float()
            barrier.wait()
            partial.copy_(sum(parts))
            barrier.wait()

        executor = TensorRTExecutor(*read_shard(engine, whole, rank), HostLauncher(), add_up)
        executor.load()
        own = caches[..., rank : rank + 1, :].bfloat16().contiguous()  # the executor keeps its address alone
        executor.bind(*own)
        return executor.draft(block)["hidden"]

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(hidden_of, range(2))
    assert torch.equal(first, second)
    alone = OnnxExecutor(engine, whole)
    alone.load()
    alone.bind(*caches)
    expected = alone.draft(DraftInputs(*(x.int() if i else x for i, x in enumerate(block))))["hidden"]
    error = (first - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert error.max() < 0.3  # BF16 between segments rounds some FP4 codes elsewhere; another block's is off by 1.4


def test_a_full_slot(built: Path, manifest: Manifest) -> None:
    drafter = planned_drafter(built, manifest)
    width = manifest.draft.target_hidden_size
    drafter.inject([0], [96], torch.randn(96, width))
    message = refusal(lambda: drafter.inject([0], [1], torch.randn(1, width)), RequestError)
    assert (
        "context of slot 0: expected at most 96 rows, for which the plan was built, found 96 and 1 new ones" in message
    )
    assert "--max-seq-len" in message


def test_without_a_gpu_tensorrt_is_not_called(
    built: Path, manifest: Manifest, host: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT's runtime would crash the process."""

    def no_gpu(index: int = 0) -> None:
        raise MissingDependencyError("expected an NVIDIA driver, found no libcuda.so.1")

    monkeypatch.setattr(machine, "gpu", no_gpu)
    host.calls.clear()
    refusal(lambda: planned_drafter(built, manifest), MissingDependencyError)
    assert host.calls == []


@EACH
def test_cache_and_slots_are_those_planned(built: Path, manifest: Manifest, recipe: str) -> None:
    drafter = planned_drafter(built, manifest, num_slots=2)
    cache = drafter.cache
    assert cache.k.dtype == (torch.bfloat16 if recipe == "bf16" else torch.float8_e4m3fn)
    assert cache.k.nbytes + cache.v.nbytes == 2 * 96 * drafter.cache_bytes_per_token
    message = refusal(lambda: planned_drafter(built, manifest, num_slots=7), EngineError)
    assert "expected at most 6 slots, for which the plan was built, found 7" in message
    assert "--max-batch-size 7" in message


def test_an_engine_without_plans(draft_dir: Path, tmp_path: Path, host: HostRuntime) -> None:
    manifest = build(draft_dir, tmp_path / "engine")
    message = refusal(lambda: planned_drafter(tmp_path / "engine", manifest), EngineError)
    assert "expected context.plan, found an engine for ONNX Runtime only" in message
    assert f"dflash-trt build --plans-for {tmp_path / 'engine'}" in message


@EACH
def test_a_plan_of_another_machine(
    built: Path, manifest: Manifest, host: HostRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = host.__version__
    pretend(monkeypatch, tmp_path, version, B300)
    message = refusal(lambda: planned_drafter(built, manifest), EngineError)
    ours = "SM 12.0 with TensorRT-RTX" if version == RTX else "SM 9.0 (NVIDIA H200) with TensorRT"
    assert f"built for {ours} {version}: expected it here, found SM 10.3 (NVIDIA B300)" in message
    pretend(monkeypatch, tmp_path, version, *gpu_for(version))
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(another_plugin(tmp_path)))
    message = refusal(lambda: planned_drafter(built, manifest), EngineError)
    assert "draft.plan: expected the plugin it was built with, host code sha256 " in message


@pytest.mark.parametrize("host", [VERSIONS[-1], RTX], indirect=True)
@pytest.mark.parametrize(
    "method",
    ["Runtime.deserialize_cuda_engine", "ICudaEngine.create_execution_context",
     "IExecutionContext.set_optimization_profile_async", "IExecutionContext.set_input_shape",
     "IExecutionContext.set_tensor_address", "IExecutionContext.execute_async_v3",
     "IExecutionContext.is_stream_capturable", "IRuntimeConfig.set_runtime_cache"],
)  # fmt: skip
def test_what_tensorrt_refuses(method: str, built: Path, manifest: Manifest, host: HostRuntime) -> None:
    if host.__version__ != RTX and method.endswith(("capturable", "runtime_cache")):
        return
    if method.endswith("profile_async"):
        host.answers[method] = RuntimeError("Error in set optimization profile async.")
    else:
        host.answers[method] = False if method.startswith(("IExecutionContext", "IRuntimeConfig")) else None
    message = refusal(lambda: planned_drafter(built, manifest), EngineError)
    assert f"{built / 'context.plan'}: expected " in message
    assert f"found it refused by TensorRT{'-RTX' * (host.__version__ == RTX)} {host.__version__} (mess" in message
