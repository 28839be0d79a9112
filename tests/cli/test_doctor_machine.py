# SPDX-License-Identifier: Apache-2.0
"""Findings of doctor about packages, tools, plugin library and GPUs, on other machines than this one."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from dflash_trt.cli import doctor_machine as doctor
from dflash_trt.cli.doctor_machine import MachineFinding, examine, gpu_findings, load_plugin, plugin_finding
from dflash_trt.engine.plans import tensorrt_api
from dflash_trt.engine.plans.tensorrt_api import installed_library
from dflash_trt.trtllm import registration
from tests.contract.host_runtime import VERSIONS
from tests.paths import REPOSITORY


def finding(name: str) -> MachineFinding:
    (found,) = [finding for finding in examine() if finding.name == name]
    return found


def program(directory: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a shell script `name` first on PATH."""
    (directory / name).write_text(script)
    (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("onnxruntime").found is not None
    assert finding("torch").found is not None
    monkeypatch.setitem(doctor.PACKAGES, "no_such_package", (("everything",), "pip install no_such_package"))
    missing = finding("no_such_package")
    assert (missing.found, missing.needed_for) == (None, ("everything",))
    assert missing.fix == "pip install no_such_package"


def test_a_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert finding("Hugging Face token").found == "present"
    assert not [each for each in examine() if "hf_secret" in repr(each)]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert finding("Hugging Face token").found == "none: enough for public models"
    assert str(finding("system").found).count("Linux ")


@pytest.mark.parametrize(
    ("distribution", "found"), [("tensorrt_cu13-11.4.0.106", "11.4.0.106"), (None, "of unknown version")]
)
def test_tensorrt_is_what_brings_its_module(
    distribution: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").touch()
    if distribution:
        information = tmp_path / f"{distribution}.dist-info"
        information.mkdir()
        name, _, version = distribution.partition("-")
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (information / "top_level.txt").write_text("tensorrt\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert finding("tensorrt").found == f"{found}, plans for the GPU that builds them"


def test_every_missing_thing_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_version", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = [finding for finding in examine() if finding.found is None]
    assert {"onnxruntime", "torch", "tensorrt", "c++", "nvcc"} <= {finding.name for finding in missing}
    assert all(finding.fix and finding.needed_for for finding in missing)


def test_extras_bring_what_doctor_says() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for package, (_, fix) in doctor.PACKAGES.items():
        if "dflash-trt[" in fix:
            extra = fix.partition("[")[2].partition("]")[0]
            listed = [re.split(r"[=>\[]", requirement)[0] for requirement in project["optional-dependencies"][extra]]
            assert {package, f"{package}-cu13"} & {*listed}


def test_extras_of_the_gpu_machine_are_the_releases_that_were_read() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rtx = tensorrt_api.RUNTIMES["tensorrt_rtx"]
    assert extras["tensorrt"] == [f"tensorrt-cu13=={VERSIONS[-1]}"]
    assert extras["rtx"][0].startswith(f"{rtx.package}>={'.'.join(map(str, rtx.oldest))},")
    release, tensorrt = (requirement.partition("==")[::2] for requirement in extras["trtllm"])
    assert release == ("tensorrt_llm", registration.RELEASES[-1])
    assert tensorrt == ("tensorrt-cu13", VERSIONS[-1])
    extras_named = {name for name, (_, fix) in doctor.PACKAGES.items() if "dflash-trt[" in fix or "'.[" in fix}
    assert {"tensorrt", "tensorrt_llm"} <= extras_named


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("#!/bin/sh\necho 'c++ (Debian) 12.2.0'\necho 'Copyright (C) 2022'\n", "c++ (Debian) 12.2.0"),
        ("#!/bin/sh\necho built on 2025\necho 'tools, release 13.0, V13.0.88'\n", "tools, release 13.0, V13.0.88"),
        ("#!/bin/sh\nexit 1\n", "PATH/c++"),
        ("#!/bin/sh\nprintf '\\377 12.2'\n", "\ufffd 12.2"),
        ("\x7fELF of another machine", "PATH/c++"),
    ],
)
def test_tools(script: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "c++", script, monkeypatch)
    assert finding("c++").found == found.replace("PATH", str(tmp_path))


def test_a_tool_and_a_library_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 30)

    program(tmp_path, "c++", "#!/bin/sh\n", monkeypatch)
    monkeypatch.setattr(subprocess, "run", hang)
    assert finding("c++").found == str(tmp_path / "c++")
    assert "did not load within" in load_plugin(tmp_path / "library.so").name


CRASHES = "#include <signal.h>\n__attribute__((constructor)) static void die(void) { raise(SIGSEGV); }\n"
EMPTY = "int nothing;\n"


@pytest.fixture
def needs_tensorrt() -> None:
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")


def compiled(directory: Path, source: str) -> Path:
    (directory / "library.c").write_text(source)
    library = directory / "library.so"
    subprocess.run(
        [shutil.which("cc") or "c++", "-shared", "-fPIC", "-o", str(library), str(directory / "library.c")], check=True
    )
    return library


@pytest.mark.usefixtures("needs_tensorrt")
def test_ours_loads() -> None:
    found = load_plugin(installed_library()).found
    assert found.startswith(f"{installed_library()}, loaded by tensorrt_lean")
    assert found.endswith("DFlashKVInjectionAttention 5")


@pytest.mark.usefixtures("needs_tensorrt")
@pytest.mark.parametrize(
    ("source", "reason"), [(CRASHES, "ended its process by SIGSEGV"), (EMPTY, "finds no plugin in it")]
)
def test_libraries_that_do_not_fit(source: str, reason: str, tmp_path: Path) -> None:
    library = compiled(tmp_path, source)
    finding = load_plugin(library)
    assert finding.found is None
    assert str(library) in finding.name
    assert reason in finding.name
    assert "plugins/README.md" in finding.fix


def test_a_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(tmp_path / "none.so"))
    finding = plugin_finding()
    assert finding.found is None
    assert f"no plugin library at {tmp_path / 'none.so'}" in finding.name
    assert finding.fix


def memory(handle: int) -> SimpleNamespace:
    if handle == 1:  # DGX Spark and Jetson: one memory for CPU and GPU
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return SimpleNamespace(total=139 * 2**30)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, MachineFinding]]:
    """Findings by name on a machine with `count` GPUs, where `is_linked` says which reach each other."""

    def look(count: int, is_linked: Callable[[int, int], bool] = lambda a, b: True) -> dict[str, MachineFinding]:
        shut_down = []

        def status(a: int, b: int, index: int) -> int:
            assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            if a == 6:  # a virtual GPU
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return pynvml.NVML_P2P_STATUS_OK if is_linked(a, b) else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        for name, value in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: shut_down.append(True),
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: "NVIDIA GB10" if handle == 1 else "NVIDIA H200",
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (12, 1) if handle == 1 else (9, 0),
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetP2PStatus": status,
        }.items():
            monkeypatch.setattr(pynvml, name, value)
        found = {finding.name: finding for finding in gpu_findings()}
        assert len(shut_down) == 1
        return found

    return look


def test_gpus(machine: Callable[..., dict[str, MachineFinding]]) -> None:
    found = machine(2)
    assert found["NVIDIA driver"].found == "580.65.06"
    assert found["CUDA of the driver"].found == "13.2"
    assert found["GPU 0"].found == "NVIDIA H200, SM 9.0, 139 GiB"
    assert found["GPU 1"].found == "NVIDIA GB10, SM 12.1, memory shared with the CPU"
    assert "NVLink" not in machine(1)
    found = machine(0)
    assert found["NVIDIA GPU (the driver reports none)"].found is None
    assert found["NVIDIA driver"].found == "580.65.06"


@pytest.mark.parametrize(
    ("count", "is_linked", "words"),
    [
        (4, lambda a, b: True, "all 6 pairs of 4 GPUs"),
        (4, lambda a, b: False, "none: the GPUs reach each other over PCIe"),
        (3, lambda a, b: (a, b) != (1, 2), "not between GPUs 1 and 2"),
        (8, lambda a, b: True, "not between GPUs 6 and 7"),
    ],
)
def test_links(
    count: int, is_linked: Callable[[int, int], bool], words: str, machine: Callable[..., dict[str, MachineFinding]]
) -> None:
    assert machine(count, is_linked)["NVLink"].found == words


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    (gpu,) = gpu_findings()
    assert gpu.found is None
    assert "Not Found" in gpu.name
    assert "https://www.nvidia.com/drivers" in gpu.fix
