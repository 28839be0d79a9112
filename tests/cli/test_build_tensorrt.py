# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build --backend tensorrt`, with and without TensorRT."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import BuildError, ConfigError
from tests.checkpoint.samples import refusal
from tests.cli.commands import run, run_here
from tests.contract.checked import Checked, on_h200
from tests.contract.host_runtime import VERSIONS
from tests.engine.plans.rtx import tensorrt_rtx
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"
SMALL = ("--max-batch-size", 2, "--max-seq-len", 64, "--max-num-tokens", 16)
TENSORRT = ("--backend", "tensorrt")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return tmp_path / "engine"


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """A machine with an H200 and TensorRT 11.4, whose parser is real and whose plans are empty."""
    checked = on_h200(monkeypatch, VERSIONS[-1])
    checked.answers["Builder.build_serialized_network_to_stream"] = True
    return checked


@pytest.fixture
def _rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real builder of TensorRT-RTX, and a plugin library without kernels."""
    tensorrt_rtx()
    monkeypatch.delenv("DFLASH_TRT_PLUGIN", raising=False)


def build_engine(engine: Path, *options: object) -> None:
    run_here("build", DRAFT, "--target", TARGET, "-o", engine, *options)


def config_file(directory: Path, **settings: object) -> Path:
    file = directory / "tiny.yaml"
    base = {"description": "a fixture", "target": TARGET, "draft": DRAFT, "gpus": "h100x1", "purpose": "latency"}
    file.write_text("".join(f"{key}: {value}\n" for key, value in (base | settings).items()))
    return file


def test_without_tensorrt_the_engine_is_complete_for_onnx(engine: Path) -> None:
    result = run("build", DRAFT, "--target", TARGET, "-o", engine, *TENSORRT, *SMALL)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"{DRAFT}: shapes fit target {TARGET}; trained for: not known\n"
        "error: expected the package tensorrt 10.15 or newer, found: No module named 'tensorrt'\n"
        f"{engine} is complete for ONNX Runtime, without new plans\n\n"
        "hint: on the GPU machine: pip install 'dflash-trt[tensorrt]'; then: "
        f"dflash-trt build --plans-for {engine}\n"
    )
    manifest = read_manifest(engine)
    assert manifest.plan_options == PlanOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=16)
    assert manifest.plans == {}
    run_here("generate", engine, "--target", TARGET, "--max-tokens", "4", "--device", "cpu", "text")


def test_in_one_go_or_later(engine: Path, tensorrt: Checked, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that was built elsewhere goes on with the sizes that it was built with."""
    build_engine(engine, *TENSORRT, *SMALL)
    assert capsys.readouterr().out == f"{engine}\n"
    assert tensorrt.parsed() == ["context.onnx", "draft.onnx"]
    assert read_manifest(engine).plans.keys() == {"context", "draft"}
    run_here("build", "--plans-for", engine)
    assert capsys.readouterr().out == f"{engine}\n"
    assert tensorrt.parsed() == []
    run_here("build", "--plans-for", engine, "--max-seq-len", 65)
    assert tensorrt.parsed() == []  # plans read contexts of any length
    assert read_manifest(engine).plan_options == PlanOptions(max_batch_size=2, max_seq_len=65, max_num_tokens=16)


def test_shards_of_ranks(engine: Path, tensorrt: Checked) -> None:
    """Plans are the ranks', of both; the whole drafter stays for ONNX Runtime."""
    build_engine(engine, *TENSORRT, *SMALL, "--tp", 2)
    files = tensorrt.parsed()
    assert sorted(set(files)) == ["context.onnx", *(f"draft.{i}.onnx" for i in range(5))]
    assert len(files) == 2 * len(set(files))
    whole, plans = read_manifest(engine), read_manifest(engine / "rank1").plans
    assert (whole.num_ranks, whole.plans) == (2, {})
    assert [bool(plan.plugin_sha256) for _, plan in sorted(plans.items())] == [False, True, False, True, False, False]
    run_here("build", "--plans-for", engine)
    assert tensorrt.parsed() == []
    run_here("generate", engine, "--target", TARGET, "--max-tokens", "4", "--device", "cpu", "text")
    assert "--tp cannot be used" in run("build", "--plans-for", engine, "--tp", 2).stderr


def test_a_deployment_prints_what_ranks_would_cost(tmp_path: Path) -> None:
    """Bytes on each GPU, both ways."""
    size = r"weights [\d.]+ KiB, context [\d.]+ MiB"
    for ranks in (1, 2):
        config = config_file(tmp_path, gpus="b300x2", mode="engine", max_batch_size=64, num_ranks=ranks)
        said = run("build", config, "-o", tmp_path / "engine", "--force").stderr
        deployed = [r" \(as deployed\)" * (count == ranks) for count in (1, 2)]
        printed = f"drafter on each of 2 GPUs, .*: whole{deployed[0]}: {size}; shared by 2{deployed[1]}: {size}\n"
        assert re.search(printed, said), said
        assert read_manifest(tmp_path / "engine").num_ranks == ranks
    with pytest.raises(click.UsageError, match="--tp is for a draft checkpoint"):
        run_here("build", config, "--tp", 2)


def test_options_reach_tensorrt(engine: Path, tensorrt: Checked, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    options = ["--workspace-gib", 0.5, "--hardware-compatibility", "ampere_plus", "--version-compatible"]
    build_engine(engine, *TENSORRT, *SMALL, *options, "--timing-cache", cache)
    assert cache.stat().st_size > 0
    assert tensorrt.arguments("IBuilderConfig.set_memory_pool_limit")[0][1] == 2**29
    (level,) = tensorrt.arguments("IBuilderConfig.hardware_compatibility_level")[0]
    assert level == tensorrt.HardwareCompatibilityLevel.AMPERE_PLUS
    flags = {flag for (flag,) in tensorrt.arguments("IBuilderConfig.set_flag")}
    assert flags == {tensorrt.BuilderFlag.VERSION_COMPATIBLE}
    run_here("build", "--plans-for", engine, "--no-version-compatible", "--timing-cache", cache, "--reproducible")
    flags = {flag for (flag,) in tensorrt.arguments("IBuilderConfig.set_flag")}
    assert flags >= {tensorrt.BuilderFlag.EDITABLE_TIMING_CACHE, tensorrt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS}
    assert read_manifest(engine).plans["draft"].version_compatible is False


def test_a_precision_that_the_gpu_lacks_is_refused_before_anything_is_parsed(engine: Path, tensorrt: Checked) -> None:
    message = refusal(lambda: build_engine(engine, *TENSORRT, "--recipe", "mixed-nvfp4-fp8"), BuildError)
    assert "NVFP4: expected a GPU of SM 10.0 or newer, found SM 9.0" in message
    assert f"{engine} is complete for ONNX Runtime" in message
    assert "hint: build --recipe fp8, int4-w4a16 or bf16" in message
    assert tensorrt.parsed() == []


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4-w4a16", "bf16+fp8-kv"])
def test_plans_for_every_gpu_since_ampere_are_refused_where_not_all_have_the_precision(
    engine: Path, tensorrt: Checked, recipe: str
) -> None:
    build_engine(engine, "--recipe", recipe)
    before = (engine / "manifest.json").read_bytes()
    for command in (["--dry-run"], []):
        portable = ["build", "--plans-for", engine, "--hardware-compatibility", "ampere_plus", *command]
        message = refusal(lambda portable=portable: run_here(*portable), BuildError)  # type: ignore[misc]
        expected = (
            "expected weights that" if recipe == "nvfp4-w4a16" else "expected a GPU of SM 8.9 or newer, found SM 8.0"
        )
        assert expected in message
    assert tensorrt.parsed() == []
    assert (engine / "manifest.json").read_bytes() == before  # a later build does not inherit what was refused


QWEN = ("build", FIXTURES / "tiny-qwen3-dflash", "--target", FIXTURES / "tiny-qwen3")


@pytest.mark.usefixtures("_rtx")
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.full)])
def test_plans_for_other_gpus(twice: bool, tmp_path: Path) -> None:
    """Without a GPU; twice: the same bytes in another directory, in two steps, under other names of the same GPUs."""
    one, other = tmp_path / "e", tmp_path / "there" / "engine"
    result = run(*QWEN, "-o", one, "--recipe", "fp8", "--gpu", "sm89,sm120", *SMALL)
    assert (result.returncode, result.stdout) == (0, f"{one}\n"), result.stderr
    assert "TensorRT" not in result.stderr  # no warnings
    plans = read_manifest(one).plans.values()
    assert {(plan.runtime, plan.compute_capabilities) for plan in plans} == {("tensorrt_rtx", ("8.9", "12.0"))}
    run_here("generate", one, "--target", FIXTURES / "tiny-qwen3", "--max-tokens", "4", "--device", "cpu", "text")
    if twice:
        run_here(*QWEN, "-o", other, "--recipe", "fp8")
        assert run("build", "--plans-for", other, "--gpu", "RTX 5090,l40s", *SMALL).returncode == 0
        contents = [{file.name: file.read_bytes() for file in engine.iterdir()} for engine in (one, other)]
        assert contents[0] == contents[1]


@pytest.mark.usefixtures("_rtx")
def test_a_format_that_no_gpu_has(engine: Path) -> None:
    message = refusal(lambda: run_here(*QWEN, "-o", engine, "--recipe", "bf16+fp8-kv", "--gpu", "a100"), BuildError)
    assert "FP8: expected a GPU of SM 8.9 or newer, found SM 8.0\n" in message
    assert f"{engine} is complete for ONNX Runtime, without new plans" in message
    assert "hint: build --recipe " in message
    assert read_manifest(engine).plan_options is None


@pytest.mark.usefixtures("_rtx")
def test_gpus_that_lack_a_format_are_left_out_and_named(engine: Path) -> None:
    asked = ("--gpu", "a100,rtx3090,rtx5090", *SMALL)
    result = run(*QWEN, "-o", engine, "--recipe", "fp8", *asked)
    assert (result.returncode, result.stdout) == (0, f"{engine}\n")
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert [line[:31] for line in warnings] == ["warning: no plans for SM 8.0 (a", "warning: no plans for SM 8.6 (r"]
    assert all("expected a GPU of SM 8.9 or newer" in line for line in warnings)
    assert {plan.compute_capabilities for plan in read_manifest(engine).plans.values()} == {("12.0",)}
    again = run("build", "--plans-for", engine, "--dry-run", *asked)
    assert [line for line in again.stderr.splitlines() if line.startswith("warning: ")] == warnings


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    run_here("build", *arguments, "--dry-run", "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_dry_run_of_an_engine(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_engine(engine)
    capsys.readouterr()
    before = {file.name: file.read_bytes() for file in engine.iterdir()}
    document = dry_run(capsys, "--plans-for", engine, *SMALL)
    assert document["schema"] == "dflash-trt/plan-dry-run/1"
    assert document["options"]["max_seq_len"] == 64
    assert document["memory"]["cache_bytes"] == 2 * 64 * read_manifest(engine).draft.context_bytes_per_token(fp8=False)
    context, draft = map(shlex.split, document["trtexec"])
    assert f"--saveEngine={engine / 'context.plan'}" in context
    assert "page_table:3x8192" in next(word for word in draft if word.startswith("--maxShapes"))
    assert {file.name: file.read_bytes() for file in engine.iterdir()} == before
    run_here("build", "--plans-for", engine, *SMALL, "--dry-run")
    printed = capsys.readouterr().out
    assert f"\n{document['trtexec'][0]}\n" in printed
    assert "memory.cache_bytes" in printed


def test_dry_run_for_tensorrt_rtx(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no trtexec."""
    build_engine(engine)
    capsys.readouterr()
    document = dry_run(capsys, "--plans-for", engine, "--gpu", "rtx5090")
    assert document["trtexec"] == []
    assert document["options"]["compute_capabilities"] == ["12.0"]
    assert document["memory"]["cache_bytes"] > 0
    run_here("build", "--plans-for", engine, "--gpu", "sm89,rtx5090", "--dry-run")
    assert "without --dry-run the plans for SM 8.9, 12.0 are built here" in capsys.readouterr().out


def test_dry_run_of_an_engine_mode_deployment(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is built, the lines are those of the engine that will be."""
    config = config_file(tmp_path, mode="engine", max_seq_len=512, max_num_tokens=1024)
    document = dry_run(capsys, config, "-o", engine)
    items = {item["name"]: item["bytes"] for item in document["memory"]["items"]}
    assert items["drafter workspace"] == 8 * 2**30
    assert {"target weights", "drafter weights", "activations"} <= items.keys()
    run_here("build", config, "-o", engine)
    output = capsys.readouterr()
    assert output.out == f"{engine}\n"
    assert f"no plans yet; on the GPU machine: dflash-trt build --plans-for {engine}" in output.err
    options = read_manifest(engine).plan_options
    assert options == PlanOptions(max_batch_size=64, max_seq_len=512 + 4 * 8, max_num_tokens=1024)
    assert dry_run(capsys, "--plans-for", engine)["trtexec"] == document["trtexec"]


def test_dry_run_where_ranks_share(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each segment of each rank, before and after the engine is built; memory is a rank's."""
    config = config_file(tmp_path, gpus="b300x2", mode="engine", max_seq_len=512, num_ranks=2)
    document = dry_run(capsys, config, "-o", engine)
    plans = [f"rank{rank}/{name}.plan" for rank in range(2) for name in ("context", *(f"draft.{i}" for i in range(5)))]
    saved = [shlex.split(line)[2] for line in document["trtexec"]]
    assert saved == [f"--saveEngine={engine / plan}" for plan in plans]
    run_here("build", config, "-o", engine)
    capsys.readouterr()
    built = dry_run(capsys, "--plans-for", engine)
    assert built["trtexec"] == document["trtexec"]
    whole, options = read_manifest(engine), built["options"]
    row, pages = whole.draft.context_bytes_per_token(fp8=False, num_ranks=2), -(-options["max_seq_len"] // 32)
    assert built["memory"]["cache_bytes"] == options["max_batch_size"] * pages * 32 * row
    assert built["memory"]["weight_bytes"] == (engine / "rank0" / "model.safetensors").stat().st_size


def test_native_deployments_have_no_plans(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path, target=FIXTURES / "tiny-qwen3", draft=FIXTURES / "tiny-qwen3-dflash")
    document = dry_run(capsys, config)
    assert document["trtexec"] == []
    assert "drafter workspace" not in {item["name"] for item in document["memory"]["items"]}
    assert len(dry_run(capsys, config, *TENSORRT)["trtexec"]) == 2
    run_here("build", config, "-o", engine)
    assert "plans" not in capsys.readouterr().err
    assert read_manifest(engine).plan_options is None


def test_a_deployment_that_does_not_fit_is_refused_before_building(engine: Path, tmp_path: Path) -> None:
    sizes = {"max_batch_size": 4096, "max_num_tokens": 65536, "max_seq_len": 1048576}
    config = config_file(tmp_path, mode="engine", draft_attention="VANILLA", **sizes)
    message = refusal(lambda: run_here("build", config, "-o", engine), ConfigError)
    assert "[context-arena]" in message
    assert "tiny: " in message
    assert not engine.exists()


def test_inspect_shows_plans_and_memory(
    engine: Path, tensorrt: Checked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_engine(engine, *TENSORRT, *SMALL)
    capsys.readouterr()
    run_here("inspect", engine, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["plans"]["draft"]["version"] == tensorrt.__version__
    memory = document["tensorrt_memory"]
    assert memory["cache_bytes"] == 2 * 64 * document["context_bytes_per_token"]
    assert (memory["max_batch_size"], memory["workspace_bytes"]) == (2, 8 * 2**30)
    monkeypatch.setenv("COLUMNS", "200")
    run_here("inspect", engine)
    assert " B 1, 2; pages 1 to 8192; slots 1 to 3 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ENGINE", "--dry-run"], "--dry-run is for CONFIG.yaml or --plans-for ENGINE"),
        ([], "expected either DRAFT or --plans-for ENGINE"),
        (["draft", "--plans-for", "ENGINE"], "expected either DRAFT or --plans-for ENGINE"),
        (["--plans-for", "ENGINE", "--recipe", "fp8"], "--recipe cannot be used with --plans-for"),
        (["--plans-for", "ENGINE", "--force"], "--force cannot be used with --plans-for"),
        (["--plans-for", "ENGINE", "--reproducible"], "--reproducible needs --timing-cache"),
        (["draft", "--max-seq-len", 3], "--max-seq-len is for --backend tensorrt"),
        (["draft", "--workspace-gib", 3], "--workspace-gib is for --backend tensorrt"),
        (["draft", "--reproducible"], "--reproducible is for --backend tensorrt"),
        (["draft", *TENSORRT], "Missing option '--target'"),
        (["draft", "--gpu", "sm90"], "found 'sm90'; plans for other GPUs are TensorRT's own"),
        (["draft", *TENSORRT, "--gpu", "sm120"], "--gpu is for --backend tensorrt-rtx"),
        (["draft", "--gpu", "sm120", "--version-compatible"], "--version-compatible is for --backend tensorrt; Tens"),
        (["draft", "--gpu", "sm80", "--hardware-compatibility", "none"], "--hardware-compatibility is for --backend"),
        (["draft", "--backend", "tensorrt-rtx", "--timing-cache", "t"], "--timing-cache is for --backend tensorrt;"),
        (["draft", "--backend", "tensorflow"], "'tensorflow' is not one of 'onnx', 'tensorrt', 'tensorrt-rtx'"),
        (["draft", *TENSORRT, "--workspace-gib", 0], "0.0 is not in the range"),
        (["draft", *TENSORRT, "--workspace-gib", 1e300], "1e+300 is not in the range"),
        (["draft", *TENSORRT, "--max-batch-size", 2**31], "2147483648 is not in the range"),
    ],
)
def test_usage(engine: Path, arguments: list[object], words: str) -> None:
    engine.mkdir()
    here = [engine if argument == "ENGINE" else argument for argument in arguments]
    with pytest.raises(click.UsageError) as caught:
        run_here("build", *here)
    assert words in caught.value.format_message()
