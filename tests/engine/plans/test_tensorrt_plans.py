# SPDX-License-Identifier: Apache-2.0
"""`build DIR --backend tensorrt`, on the oldest and the newest bindings' names: what is built, kept and refused."""

import os
from pathlib import Path

import msgspec
import pytest

from dflash_trt.engine.engine_directory import carry_plans
from dflash_trt.engine.manifest import Manifest, read_manifest, sha256
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.compile import TimingCache
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import BuildError, DFlashError, EngineError, MissingDependencyError
from tests.checkpoint.samples import refusal
from tests.contract.machine import B300, H200, pretend
from tests.contract.recorder import VERSIONS, Recorder
from tests.engine.test_write import contents
from tests.engines import build
from tests.reference.synthetic import DraftSizes, write_random_draft

SMALL = PlanOptions(max_batch_size=4, max_seq_len=64, max_num_tokens=100)
PLANS = ["context.plan", "draft.plan"]
PROFILE = "context.onnx: expected a profile that TensorRT takes, found one it refuses"


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    """With heads that the plugin takes."""
    return write_random_draft(tmp_path / "draft", dialect="gpt_oss", sizes=DraftSizes(head_dim=64))


@pytest.fixture
def engine(draft_dir: Path, tmp_path: Path) -> Path:
    build(draft_dir, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture(params=VERSIONS)
def recorder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return pretend(monkeypatch, tmp_path, request.param)


def built_graphs(recorder: Recorder) -> list[str]:
    return [Path(file).name for (file,) in recorder.arguments("OnnxParser.parse_from_file")]


def test_plans_join_the_directory(engine: Path, recorder: Recorder, tmp_path: Path) -> None:
    before = contents(engine)
    add_plans(engine, SMALL)
    after = contents(engine)
    assert sorted(after.keys() - before.keys()) == PLANS
    assert all(after[name] == content for name, content in before.items() if name != "manifest.json")
    manifest = read_manifest(engine)
    plan = manifest.plans["draft"]
    assert (plan.tensorrt, plan.gpu, plan.compute_capability) == (recorder.__version__, "NVIDIA H200", "9.0")
    assert plan.plugin_sha256 == sha256(tmp_path / "libdflash_trt_plugins.so")
    assert manifest.plans["context"].plugin_sha256 is None
    assert plan.made_from == {name: manifest.sha256[name] for name in ("draft.onnx", "model.safetensors")}
    assert manifest.plan_options == SMALL
    assert [sorted(plan.profiles[0]) for plan in manifest.plans.values()] == [["T"], ["B", "pages", "slots"]]
    assert [profile["B"].max for profile in plan.profiles] == [1, 2, 4]
    assert not any(file.stat().st_nlink > 1 for file in engine.iterdir())
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_plan_that_nobody_vouches_for(engine: Path, recorder: Recorder) -> None:
    manifest = add_plans(engine, SMALL)
    hashes = {name: value for name, value in manifest.sha256.items() if name != "draft.plan"}
    (engine / "manifest.json").write_bytes(msgspec.structs.replace(manifest, sha256=hashes).encode())
    assert "missing key sha256.draft.plan" in refusal(lambda: read_manifest(engine), EngineError)


def test_files_of_others_stay(engine: Path, recorder: Recorder) -> None:
    (engine / "notes").mkdir()
    (engine / "notes" / "README.md").write_text("mine")
    (engine / "weights").symlink_to("model.safetensors")
    add_plans(engine, SMALL)
    assert (engine / "notes" / "README.md").read_text() == "mine"
    assert (engine / "weights").readlink() == Path("model.safetensors")
    assert sorted(file.name for file in engine.glob("*.plan")) == PLANS


def test_how_a_plan_is_built(engine: Path, recorder: Recorder) -> None:
    add_plans(engine, SMALL)
    (flags,) = {flags for (flags,) in recorder.arguments("Builder.create_network")}
    assert flags == 1 << recorder.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert recorder.arguments("IBuilderConfig.max_aux_streams") == [(0,), (0,)]
    assert (
        recorder.arguments("IBuilderConfig.set_memory_pool_limit")
        == [(recorder.MemoryPoolType.WORKSPACE, SMALL.workspace_bytes)] * 2
    )
    assert (
        recorder.arguments("IBuilderConfig.hardware_compatibility_level")
        == [(recorder.HardwareCompatibilityLevel.NONE,)] * 2
    )
    assert recorder.arguments("IBuilderConfig.set_flag") == []
    shapes = {arguments[0]: arguments[1:] for arguments in recorder.arguments("IOptimizationProfile.set_shape")}
    spec = read_manifest(engine).draft
    block = [4, spec.block_size, spec.hidden_size]
    assert shapes["noise_embeds"] == (block, block, block)
    assert shapes["context_pointers"] == ([len(spec.layers)],) * 3
    assert shapes["page_table"] == ([1, 1], [1, 1], [5, 8192])
    assert recorder.arguments("IPluginRegistry.load_library") == [(os.environ["DFLASH_TRT_PLUGIN"],)]


def test_portable_plans_carry_the_plugin(engine: Path, recorder: Recorder) -> None:
    add_plans(
        engine,
        msgspec.structs.replace(SMALL, version_compatible=True, hardware_compatibility="same_compute_capability"),
    )
    assert recorder.arguments("IBuilderConfig.set_flag") == [(recorder.BuilderFlag.VERSION_COMPATIBLE,)] * 2
    assert recorder.arguments("IBuilderConfig.plugins_to_serialize") == [([os.environ["DFLASH_TRT_PLUGIN"]],)]
    levels = recorder.arguments("IBuilderConfig.hardware_compatibility_level")
    assert levels == [(recorder.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,)] * 2


def test_only_what_changed_is_built_again(engine: Path, recorder: Recorder, tmp_path: Path) -> None:
    add_plans(engine, SMALL)
    first = contents(engine)
    recorder.calls.clear()
    add_plans(engine)
    assert built_graphs(recorder) == []
    assert contents(engine) == first

    add_plans(engine, msgspec.structs.replace(SMALL, max_num_tokens=200))
    assert built_graphs(recorder) == ["context.onnx"]
    recorder.calls.clear()
    add_plans(engine, msgspec.structs.replace(SMALL, max_num_tokens=200, max_batch_size=3))
    assert built_graphs(recorder) == ["draft.onnx"]
    recorder.calls.clear()
    (tmp_path / "libdflash_trt_plugins.so").write_bytes(b"a newer plugin")
    add_plans(engine)
    assert built_graphs(recorder) == ["draft.onnx"]
    read_manifest(engine)


def test_another_machine_builds_all_again(
    engine: Path, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plans(engine, SMALL)
    other = pretend(monkeypatch, tmp_path, recorder.__version__, B300)
    manifest = add_plans(engine)
    assert built_graphs(other) == ["context.onnx", "draft.onnx"]
    assert {plan.gpu for plan in manifest.plans.values()} == {"NVIDIA B300"}


def test_a_portable_plan_stays_on_a_machine_that_runs_it(
    engine: Path, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plans(engine, msgspec.structs.replace(SMALL, hardware_compatibility="same_compute_capability"))
    h100 = msgspec.structs.replace(H200, name="NVIDIA H100")
    other = pretend(monkeypatch, tmp_path, recorder.__version__, h100)
    manifest = add_plans(engine)
    assert built_graphs(other) == []
    assert {plan.gpu for plan in manifest.plans.values()} == {"NVIDIA H200"}


@pytest.mark.parametrize(
    ("method", "answer", "error", "words"),
    [
        ("Builder.build_serialized_network", None, BuildError, "context.onnx: TensorRT VERSION built no plan"),
        ("IBuilderConfig.add_optimization_profile", -1, BuildError, PROFILE),
        ("IOptimizationProfile.set_shape", RuntimeError("Shape provided is inconsistent."), BuildError, PROFILE),
        ("IPluginRegistry.load_library", None, EngineError,
         "expected the plugin dflash_trt::DFlashKVInjectionAttention version 3"),
        ("IBuilderConfig.set_timing_cache", False, BuildError,
         "timing.cache: expected a timing cache of this GPU and TensorRT"),
    ],
)  # fmt: skip
def test_what_tensorrt_refuses(
    method: str, answer: object, error: type[DFlashError], words: str, engine: Path, recorder: Recorder, tmp_path: Path
) -> None:
    recorder.answers[method] = answer
    before = contents(engine)
    message = refusal(lambda: add_plans(engine, SMALL, TimingCache(file=tmp_path / "timing.cache")), error)
    assert words.replace("VERSION", recorder.__version__) in message
    assert contents(engine).keys() == before.keys()
    assert read_manifest(engine).plan_options == SMALL  # kept for the next try
    assert read_manifest(engine).plans == {}


def test_a_layer_that_the_parser_refuses(engine: Path, recorder: Recorder) -> None:
    recorder.parser_errors += [("layers.1.self_attn/MatMul", "MatMul", "no such GEMM"), ("", "", "and more")]
    message = refusal(lambda: add_plans(engine, SMALL), BuildError)
    assert "\n  layers.1.self_attn/MatMul (MatMul): no such GEMM\n  and more\nhint:" in message


def test_timing_cache(engine: Path, recorder: Recorder, tmp_path: Path) -> None:
    file = tmp_path / "timing.cache"
    add_plans(engine, SMALL, TimingCache(file=file))
    assert file.read_bytes() == b"timings"
    contents_given = [content for (content,) in recorder.arguments("IBuilderConfig.create_timing_cache")]
    assert contents_given == [b"", b"timings"]  # the second plan profits from the first
    assert {ignore for _, ignore in recorder.arguments("IBuilderConfig.set_timing_cache")} == {False}
    assert sorted(tmp_path.glob(".timing*")) == []


def test_reproducible_builds_measure_nothing(engine: Path, recorder: Recorder, tmp_path: Path) -> None:
    cache = TimingCache(file=tmp_path / "timing.cache", reproducible=True)
    message = refusal(lambda: add_plans(engine, SMALL, cache), BuildError)
    assert f"--reproducible: no timing cache at {cache.file}" in message
    cache.file.write_bytes(b"old")
    add_plans(engine, SMALL, cache)
    flags = {flag for (flag,) in recorder.arguments("IBuilderConfig.set_flag")}
    assert flags == {recorder.BuilderFlag.EDITABLE_TIMING_CACHE, recorder.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS}
    assert cache.file.read_bytes() == b"old"


def test_plans_of_the_same_bytes_are_carried_over(
    engine: Path, recorder: Recorder, draft_dir: Path, tmp_path: Path
) -> None:
    add_plans(engine, SMALL)
    manifest = build(draft_dir, tmp_path / "again")
    carried = carry_plans(engine, tmp_path / "again", manifest)
    assert carried == read_manifest(engine)
    assert (tmp_path / "again" / "draft.plan").read_bytes() == (engine / "draft.plan").read_bytes()
    asked = msgspec.structs.replace(SMALL, max_batch_size=1)
    (tmp_path / "second").mkdir()
    of_another_size = msgspec.structs.replace(manifest, plan_options=asked)
    assert carry_plans(engine, tmp_path / "second", of_another_size).plan_options == asked
    changed = msgspec.structs.replace(manifest, sha256=manifest.sha256 | {"draft.onnx": "0" * 64})
    (tmp_path / "third").mkdir()
    assert carry_plans(engine, tmp_path / "third", changed).plans.keys() == {"context"}
    assert [file.name for file in (tmp_path / "third").iterdir()] == ["context.plan"]
    assert carry_plans(draft_dir, tmp_path / "third", manifest) == manifest
    (engine / "context.plan").write_bytes(b"damaged")
    assert carry_plans(engine, tmp_path / "third", manifest) == manifest


def test_tensorrt_that_is_too_old(engine: Path, recorder: Recorder) -> None:
    recorder.__version__ = "10.14.1.48.post1"
    message = refusal(lambda: add_plans(engine, SMALL), MissingDependencyError)
    assert "expected the package tensorrt 10.15 or newer, found 10.14.1.48.post1" in message


def test_it_continues_on_another_machine_with_no_other_file(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal(lambda: add_plans(engine, SMALL), MissingDependencyError)
    moved = engine.rename(tmp_path / "moved")
    recorder = pretend(monkeypatch, tmp_path, VERSIONS[0])
    manifest = add_plans(moved)
    assert built_graphs(recorder) == ["context.onnx", "draft.onnx"]
    assert manifest == read_manifest(moved)
    assert manifest.plan_options == SMALL


def test_directories_without_plans_keep_their_bytes(engine: Path) -> None:
    manifest: Manifest = read_manifest(engine)
    assert b"plan" not in (engine / "manifest.json").read_bytes()
    assert manifest.encode() == (engine / "manifest.json").read_bytes()
