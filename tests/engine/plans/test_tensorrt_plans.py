# SPDX-License-Identifier: Apache-2.0
"""Plans of an engine directory: what is built, kept and refused, by TensorRT-RTX's real builder and for TensorRT.

TensorRT's own builder needs a GPU: in its place the same real builder is called as the oldest and the newest bindings
allow.
"""

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.plans import add_plans as module
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.compile import build_plan
from dflash_trt.engine.plans.plan import PlanOptions, Range, profiles
from dflash_trt.engine.plans.plan_process import PlanJob, build_apart
from dflash_trt.engine.plans.tensorrt_api import host_code, installed_library
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.errors import BuildError, DFlashError, EngineError, MissingDependencyError
from tests.checkpoint.samples import refusal
from tests.contract.checked import Checked, on_h200
from tests.contract.host_runtime import RTX, VERSIONS
from tests.contract.machine import B300, H200, RTX_5090, another_plugin
from tests.engine.plans.rtx import tensorrt_rtx
from tests.engine.test_write import contents
from tests.engines import build
from tests.reference.synthetic import DraftSizes, write_random_draft

TENSORRT = PlanOptions(max_batch_size=4, max_seq_len=64, max_num_tokens=100)
SMALL = PlanOptions(
    max_batch_size=1, max_seq_len=64, max_num_tokens=16, runtime="tensorrt_rtx", compute_capabilities=("8.9", "12.0")
)
PLANS = ["context.plan", "draft.plan"]
PROFILE = "context.onnx: expected a profile that TensorRT takes, found one it refuses"
NO_BUILD = {"Builder.build_serialized_network_to_stream": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that the plugin takes."""
    sizes = DraftSizes(head_dim=64)
    return write_random_draft(tmp_path_factory.mktemp("source") / "draft", dialect="gpt_oss", sizes=sizes)


@pytest.fixture
def engine(source: Path, tmp_path: Path) -> Path:
    build(source, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs that were to be built; the job stands in the plan's place, where only which ones are built matters."""
    files = list[str]()

    def build_apart(job: PlanJob, directory: Path, output: Path) -> None:
        files.append(job.graph.file)
        output.write_bytes(msgspec.json.encode(job))

    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(installed_library()))
    monkeypatch.setattr(module, "build_apart", build_apart)
    return files


def taken(files: list[str]) -> list[str]:
    """Plans built since the last call."""
    found = list(files)
    files.clear()
    return found


def test_plans_join_the_directory(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real builder's, here in this process, which saves a start for each."""

    def build_apart(job: PlanJob, directory: Path, output: Path) -> None:
        with output.open("wb") as file:
            build_plan(
                tensorrt_rtx(), directory, job.graph, profiles(job.name, job.options), job.options,
                compute_capabilities=job.compute_capabilities, plugin=None, timing_cache=None, output=file,
            )  # fmt: skip

    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(installed_library()))
    monkeypatch.setattr(module, "build_apart", build_apart)
    before = contents(engine)
    (engine / "notes").mkdir()
    (engine / "notes" / "README.md").write_text("of others")
    (engine / "weights").symlink_to("model.safetensors")
    add_plans(engine, SMALL)
    assert (engine / "notes" / "README.md").read_text() == "of others"
    assert (engine / "weights").readlink() == Path("model.safetensors")
    assert sorted({file.name for file in engine.iterdir()} - before.keys() - {"notes", "weights"}) == PLANS
    assert all((engine / name).read_bytes() == old for name, old in before.items() if name != "manifest.json")
    manifest = read_manifest(engine)
    plan = manifest.plans["draft"]
    assert (plan.runtime, plan.version, plan.gpu) == ("tensorrt_rtx", RTX, None)
    assert plan.compute_capabilities == ("8.9", "12.0")
    assert plan.plugin_sha256 == host_code(installed_library())
    assert manifest.plans["context"].plugin_sha256 is None
    assert plan.made_from == {name: manifest.sha256[name] for name in ("draft.onnx", "model.safetensors")}
    assert manifest.plan_options == SMALL
    assert [sorted(plan.profiles[0]) for plan in manifest.plans.values()] == [["T"], ["B", "pages", "slots"]]
    assert not any(file.lstat().st_nlink > 1 for file in engine.iterdir() if file.is_file())
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []

    hashes = {name: value for name, value in manifest.sha256.items() if name != "draft.plan"}
    (engine / "manifest.json").write_bytes(msgspec.structs.replace(manifest, sha256=hashes).encode())
    assert "missing key sha256.draft.plan" in refusal(lambda: read_manifest(engine), EngineError)


def test_only_what_changed_is_built_again(
    engine: Path, built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plans(engine, SMALL)
    first = contents(engine)
    assert taken(built) == ["context.onnx", "draft.onnx"]
    add_plans(engine)
    assert taken(built) == []
    assert contents(engine) == first
    add_plans(engine, SMALL.changed(max_num_tokens=32))
    assert taken(built) == ["context.onnx"]
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(another_plugin(tmp_path)))
    add_plans(engine)
    assert taken(built) == ["draft.onnx"]
    add_plans(engine, SMALL.changed(max_num_tokens=32, compute_capabilities=("12.0",)))
    assert taken(built) == ["context.onnx", "draft.onnx"]
    assert {plan.compute_capabilities for plan in read_manifest(engine).plans.values()} == {("12.0",)}


def test_without_a_list_they_are_for_this_gpu(engine: Path, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = SMALL.changed(compute_capabilities=())
    monkeypatch.setattr(machine, "gpu", lambda index=0: RTX_5090)
    manifest = add_plans(engine, here)
    assert {plan.compute_capabilities for plan in manifest.plans.values()} == {("12.0",)}
    assert manifest.plan_options == here
    monkeypatch.setattr(machine, "gpu", lambda index=0: H200)
    message = refusal(lambda: add_plans(engine), BuildError)
    assert "TensorRT-RTX: expected a GPU of SM 8.0, 8.6, 8.9, 12.0, 12.1, found SM 9.0" in message
    assert "--backend tensorrt" in message


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"hardware_compatibility": "ampere_plus"}, "--hardware-compatibility: expected an option of TensorRT-RTX"),
        ({"version_compatible": True}, "--version-compatible: expected an option of TensorRT-RTX"),
        ({}, "--timing-cache: expected an option of TensorRT-RTX"),
    ],
)
def test_what_only_tensorrt_has(changes: dict[str, Any], option: str, engine: Path, built: list[str]) -> None:
    cache = None if changes else TimingCache(file=Path("t"))
    message = refusal(lambda: add_plans(engine, SMALL.changed(**changes), cache), BuildError)
    assert option in message
    assert "--gpu" in message
    assert read_manifest(engine).plan_options is None


def test_what_only_tensorrt_rtx_has(engine: Path) -> None:
    options = TENSORRT.changed(compute_capabilities=("12.0",))
    assert "--gpu: expected an option of TensorRT, found one" in refusal(lambda: add_plans(engine, options), BuildError)
    other = msgspec.structs.replace(TENSORRT, version_compatible=True).changed(runtime="tensorrt_rtx")
    assert other == TENSORRT.changed(runtime="tensorrt_rtx")
    assert not other.version_compatible


def test_without_the_extra(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    message = refusal(lambda: add_plans(engine, SMALL), MissingDependencyError)
    assert "expected the package tensorrt_rtx_cu13_bindings 1.7 or newer, found: " in message
    assert "hint: pip install 'dflash-trt[rtx]'" in message
    assert read_manifest(engine).plan_options == SMALL  # kept for the next try


def test_a_process_of_its_own_says_why(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that it refuses, and the resulting error."""
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(installed_library()))
    manifest = read_manifest(engine)
    job = PlanJob(
        name="draft", graph=manifest.graphs["draft"], options=SMALL, compute_capabilities=("12.0",),
        plugin=(str(installed_library()), "DFlashKVInjectionAttention", "99", "dflash_trt"),
    )  # fmt: skip
    assert "expected the plugin dflash_trt::DFlashKVInjectionAttention version 99" in refusal(
        lambda: build_apart(job, engine, tmp_path / "plan"), BuildError
    )
    orphan = msgspec.structs.replace(job, parent="1")
    assert "draft.onnx: expected a plan, found that TensorRT-RTX ended its process with status 1" in refusal(
        lambda: build_apart(orphan, engine, tmp_path / "plan"), BuildError
    )
    assert not (tmp_path / "plan").exists()


def test_a_full_disk_ends_the_build(engine: Path) -> None:
    """An exception in the writer would end the process in TensorRT's C++ frames."""
    graph = read_manifest(engine).graphs["context"]
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space left on device"):
        build_plan(
            tensorrt_rtx(), engine, graph, profiles("context", SMALL), SMALL, compute_capabilities=("12.0",),
            plugin=None, timing_cache=None, output=full,
        )  # fmt: skip


@pytest.mark.full
def test_a_process_of_its_own_says_that_the_disk_is_full(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(installed_library()))
    manifest = read_manifest(engine)
    job = PlanJob(
        name="context", graph=manifest.graphs["context"], options=SMALL, compute_capabilities=("12.0",),
        plugin=(str(installed_library()), "DFlashKVInjectionAttention", manifest.plugin.version, "dflash_trt"),
    )  # fmt: skip
    monkeypatch.setattr(subprocess, "run", partial(subprocess.run, preexec_fn=limit_files))
    message = refusal(lambda: build_apart(job, engine, tmp_path / "plan"), BuildError)
    assert "context.plan cannot be written: File too large" in message


def limit_files() -> None:
    """Stops writing where a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_without_the_name_that_the_parser_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An editable install from before it was there; the process would end without a word."""
    tensorrt_rtx()
    monkeypatch.setattr(tensorrt_api, "installed_library", lambda: tmp_path / "libdflash_trt_plugins.so")
    message = refusal(lambda: tensorrt_api.load_tensorrt("tensorrt_rtx"), MissingDependencyError)
    assert f"expected {tmp_path / 'libtensorrt_rtx.so'} to load, found: " in message
    assert "hint: reinstall dflash-trt" in message


@pytest.fixture(params=VERSIONS)
def tensorrt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checked]:
    return on_h200(monkeypatch, request.param)


def test_how_tensorrt_builds_a_plan(engine: Path, tensorrt: Checked) -> None:
    """Every call is one that both bindings have, and ends in a plan."""
    add_plans(engine, TENSORRT.changed(max_num_tokens=16))
    (flags,) = {flags for (flags,) in tensorrt.arguments("Builder.create_network")}
    assert flags == 1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert tensorrt.arguments("IBuilderConfig.max_aux_streams") == [(0,), (0,)]
    workspace = (tensorrt.MemoryPoolType.WORKSPACE, TENSORRT.workspace_bytes)
    assert tensorrt.arguments("IBuilderConfig.set_memory_pool_limit") == [workspace] * 2
    assert (
        tensorrt.arguments("IBuilderConfig.hardware_compatibility_level")
        == [(tensorrt.HardwareCompatibilityLevel.NONE,)] * 2
    )
    assert tensorrt.arguments("IBuilderConfig.set_flag") == []
    shapes = {arguments[0]: arguments[1:] for arguments in tensorrt.arguments("IOptimizationProfile.set_shape")}
    spec = read_manifest(engine).draft
    block = [4, spec.block_size, spec.hidden_size]
    assert shapes["noise_embeds"] == (block, block, block)
    assert shapes["context_pointers"] == ([len(spec.layers), 2],) * 3
    assert shapes["page_table"] == ([1, 1], [1, 1], [5, 8192])
    plan = read_manifest(engine).plans["draft"]
    assert (plan.runtime, plan.version, plan.gpu) == ("tensorrt", tensorrt.__version__, "NVIDIA H200")
    assert plan.compute_capabilities == ("9.0",)
    assert [profile["B"].max for profile in plan.profiles] == [1, 2, 4]


def test_portable_plans_carry_the_plugin(engine: Path, tensorrt: Checked) -> None:
    tensorrt.answers |= NO_BUILD
    portable = TENSORRT.changed(version_compatible=True, hardware_compatibility="same_compute_capability")
    add_plans(engine, portable)
    assert tensorrt.arguments("IBuilderConfig.set_flag") == [(tensorrt.BuilderFlag.VERSION_COMPATIBLE,)] * 2
    assert tensorrt.arguments("IBuilderConfig.plugins_to_serialize") == [([str(installed_library())],)]
    levels = tensorrt.arguments("IBuilderConfig.hardware_compatibility_level")
    assert levels == [(tensorrt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,)] * 2


def test_another_machine_builds_all_again(engine: Path, tensorrt: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorrt.answers |= NO_BUILD
    add_plans(engine, TENSORRT)
    tensorrt.parsed()
    monkeypatch.setattr(machine, "gpu", lambda index=0: B300)
    manifest = add_plans(engine)
    assert tensorrt.parsed() == ["context.onnx", "draft.onnx"]
    assert {plan.gpu for plan in manifest.plans.values()} == {"NVIDIA B300"}
    add_plans(engine, TENSORRT.changed(hardware_compatibility="same_compute_capability"))
    tensorrt.parsed()
    monkeypatch.setattr(machine, "gpu", lambda index=0: msgspec.structs.replace(B300, name="NVIDIA GB300"))
    manifest = add_plans(engine)
    assert tensorrt.parsed() == []  # a portable plan stays on a machine that runs it
    assert {plan.gpu for plan in manifest.plans.values()} == {"NVIDIA B300"}


@pytest.mark.parametrize(
    ("method", "answer", "error", "words"),
    [
        ("Builder.build_serialized_network_to_stream", False, BuildError,
         "context.onnx: TensorRT VERSION built no plan"),
        ("IBuilderConfig.add_optimization_profile", -1, BuildError, PROFILE),
        ("IOptimizationProfile.set_shape", RuntimeError("Shape provided is inconsistent."), BuildError, PROFILE),
        ("IPluginRegistry.get_creator", None, EngineError,
         "expected the plugin dflash_trt::DFlashKVInjectionAttention version 5"),
        ("IBuilderConfig.set_timing_cache", False, BuildError,
         "timing.cache is a timing cache of another GPU or TensorRT"),
    ],
)  # fmt: skip
def test_what_tensorrt_refuses(
    method: str, answer: object, error: type[DFlashError], words: str, engine: Path, tensorrt: Checked, tmp_path: Path
) -> None:
    tensorrt.answers[method] = answer
    before = contents(engine)
    message = refusal(lambda: add_plans(engine, TENSORRT, TimingCache(file=tmp_path / "timing.cache")), error)
    assert words.replace("VERSION", tensorrt.__version__) in message
    assert contents(engine).keys() == before.keys()
    assert read_manifest(engine).plan_options == TENSORRT  # kept for the next try
    assert read_manifest(engine).plans == {}


def test_the_real_builder_refuses_a_profile(engine: Path, tensorrt: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings raise where a smallest shape is larger than the best."""
    monkeypatch.setattr(module, "profiles", lambda graph, options: ({"T": Range(min=9, opt=8, max=7)},))
    assert PROFILE in refusal(lambda: add_plans(engine, TENSORRT), BuildError)


def test_timing_cache(engine: Path, tensorrt: Checked, tmp_path: Path) -> None:
    tensorrt.answers |= NO_BUILD
    file = tmp_path / "timing.cache"
    add_plans(engine, TENSORRT, TimingCache(file=file))
    first, second = (content for (content,) in tensorrt.arguments("IBuilderConfig.create_timing_cache"))
    assert first == b""
    assert len(second) > 0  # the second plan profits from the first
    assert {ignore for _, ignore in tensorrt.arguments("IBuilderConfig.set_timing_cache")} == {False}
    assert sorted(tmp_path.glob(".timing*")) == []


def test_reproducible_builds_measure_nothing(engine: Path, tensorrt: Checked, tmp_path: Path) -> None:
    tensorrt.answers |= NO_BUILD
    cache = TimingCache(file=tmp_path / "timing.cache", reproducible=True)
    message = refusal(lambda: add_plans(engine, TENSORRT, cache), BuildError)
    assert f"--reproducible: no timing cache at {cache.file}" in message
    add_plans(engine, TENSORRT, TimingCache(file=cache.file))
    before = cache.file.read_bytes()
    add_plans(engine, TENSORRT.changed(workspace_bytes=2**20), cache)
    flags = {flag for (flag,) in tensorrt.arguments("IBuilderConfig.set_flag")}
    assert flags == {tensorrt.BuilderFlag.EDITABLE_TIMING_CACHE, tensorrt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS}
    assert cache.file.read_bytes() == before


def test_tensorrt_that_is_too_old(engine: Path, tensorrt: Checked) -> None:
    tensorrt.__version__ = "10.14.1.48.post1"
    message = refusal(lambda: add_plans(engine, TENSORRT), MissingDependencyError)
    assert "expected the package tensorrt 10.15 or newer, found 10.14.1.48.post1" in message


def test_it_continues_on_another_machine_with_no_other_file(engine: Path, built: list[str], tmp_path: Path) -> None:
    refusal(lambda: add_plans(engine, SMALL.changed(compute_capabilities=())), MissingDependencyError)
    moved = engine.rename(tmp_path / "moved")
    manifest = add_plans(moved, SMALL)
    assert taken(built) == ["context.onnx", "draft.onnx"]
    assert manifest == read_manifest(moved)


def test_directories_without_plans_keep_their_bytes(engine: Path) -> None:
    manifest: Manifest = read_manifest(engine)
    assert b"plan" not in (engine / "manifest.json").read_bytes()
    assert manifest.encode() == (engine / "manifest.json").read_bytes()


KILLED = """
import os, signal, sys
from pathlib import Path
from dflash_trt.engine.plans.add_plans import add_plans
from tests.engine.plans.test_tensorrt_plans import SMALL

step, kill_at = 0, int(sys.argv[2])

def hook(event, values):
    global step
    if event in ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "ctypes.dlopen"):
        step += 1
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
add_plans(Path(sys.argv[1]), SMALL)
print(step)
"""


@pytest.mark.full
def test_killed_at_any_moment_it_is_whole(source: Path, tmp_path: Path) -> None:
    """Old plans, new ones or none, every hash right; the next run ends as if nothing had been."""

    def run(kill_at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / "engine"), str(kill_at)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    build(source, tmp_path / "engine")
    before = contents(tmp_path / "engine")
    steps = int(run(0).stdout)
    after = contents(tmp_path / "engine")
    states = set()
    for kill_at in [*range(1, steps, steps // 6), *range(steps - 5, steps + 1)]:
        shutil.rmtree(tmp_path / "engine")
        (tmp_path / "engine").mkdir()
        for name, content in before.items():
            (tmp_path / "engine" / name).write_bytes(content)
        assert run(kill_at).returncode == -signal.SIGKILL
        states.add(len(read_manifest(tmp_path / "engine").plans))
        assert run(0).returncode == 0
        assert contents(tmp_path / "engine") == after
        assert [entry.name for entry in tmp_path.iterdir()] == ["engine"]
    assert states == {0, 2}
