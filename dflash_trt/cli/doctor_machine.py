# SPDX-License-Identifier: Apache-2.0
"""Python, packages, tools, plugin library and GPUs of this machine, each with the command that installs it."""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.api.plugins import GROUPS, described, installed
from dflash_trt.engine.plans.machine import NAMES
from dflash_trt.errors import MissingDependencyError
from dflash_trt.files.processor import cpu_model

RUNNING = ("generate", "chat", "serve", "verify", "capture", "dynamo")
DYNAMO = "from a clone: make dynamo && . .venv-dynamo/bin/activate && python -m dflash_trt dynamo --help"
# A package, the commands that need it, and the extra of pyproject.toml that brings it.
PACKAGES = {
    "onnxruntime": ((*RUNNING, "quantize --calibration"), "pip install 'dflash-trt[run]'"),
    "torch": ((*RUNNING, "search", "recover", "quantize --calibration"), "pip install 'dflash-trt[run]'"),
    "transformers": (RUNNING, "pip install 'dflash-trt[run]'"),
    "nvidia-modelopt": (("quantize --calibration",), "pip install 'dflash-trt[calibrate]'"),
    "matplotlib": (("bench report", "estimate --html", "--plot"), "pip install 'dflash-trt[observe]'"),
    "starlette": (("serve",), "pip install 'dflash-trt[serve]'"),
    "llguidance": (("structured outputs",), "pip install 'dflash-trt[serve]'"),
    "opentelemetry-sdk": (("traces of serve",), "pip install 'dflash-trt[serve]'"),
    "httpx2": (("doctor URL", "bench run"), "pip install 'dflash-trt[observe]'"),
    "tritonclient": (("triton-repo",), "pip install 'dflash-trt[triton]'"),
    "mpi4py": (("doctor --ranks", "mpiexec instead of torchrun"), "pip install mpi4py mpich"),
    "ai-dynamo-runtime": (("dynamo",), f"in an environment of its own, {DYNAMO}"),
    "tensorrt": (("TensorRT plans",), "on the GPU machine: pip install 'dflash-trt[tensorrt]'"),
    "tensorrt_rtx_cu13_bindings": (("build --gpu",), "pip install 'dflash-trt[rtx]'"),
    "tensorrt_llm": (
        ("serving with TensorRT-LLM",),
        "in an environment of its own, from a clone: pip install '.[trtllm]'",
    ),
    "vllm": (("serving with vLLM",), "in an environment of its own on the GPU machine: pip install vllm"),
    "sglang": (("serving with SGLang",), "in an environment of its own on the GPU machine: pip install sglang"),
}
TOOLS = {
    "c++": (("installing from source",), "apt-get install g++"),
    "nvcc": (("the CUDA plugin",), "install the CUDA toolkit: https://developer.nvidia.com/cuda-downloads"),
}
RTX_PLANS = f"plans for SM {', '.join(NAMES)}: A100, RTX 30 to 50, L40S, GB10"
PLUGIN_SECONDS = 120  # the first import of TensorRT reads gigabytes
GPU_NEEDED_FOR = ("TensorRT plans", "serving with TensorRT-LLM")


class MachineFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a command may need."""

    name: str
    found: str | None
    """Version or description; None when it is missing."""
    needed_for: tuple[str, ...] = ()
    fix: str | None = None
    """Command that installs it."""


def examine() -> list[MachineFinding]:
    """Look at Python, packages, tools, plugin and GPUs; load none of them, and never fail for one that is missing."""
    versions = [(name, _described(name), *needs) for name, needs in PACKAGES.items()]
    versions += [(name, _tool(name), *needs) for name, needs in TOOLS.items()]
    return [
        MachineFinding(name="system", found=_system()),
        MachineFinding(name="Python", found=platform.python_version()),
        MachineFinding(name="CPU", found=f"{platform.machine()}, {cpu_model()}"),
        *(MachineFinding(name=name, found=found, needed_for=uses, fix=fix) for name, found, uses, fix in versions),
        *(
            MachineFinding(name=f"plug-in {each.name}", found=described(each))
            for group in GROUPS
            for each in installed(group)
        ),
        *_hub(),
        plugin_finding(),
        *gpu_findings(),
    ]


def _system() -> str:
    """`Debian GNU/Linux 12 (bookworm), Linux 6.1.0`."""
    release = {}
    with suppress(OSError):
        release = platform.freedesktop_os_release()
    return ", ".join(filter(None, [release.get("PRETTY_NAME"), f"{platform.system()} {platform.release()}"]))


def _hub() -> list[MachineFinding]:
    """The cache of Hugging Face's hub, and whether there is a token, which is never shown."""
    from huggingface_hub import constants, get_token

    uses = ("models by repository id",)
    token = "none: enough for public models" if get_token() is None else "present"
    return [
        MachineFinding(name="Hugging Face cache", found=str(constants.HF_HUB_CACHE), needed_for=uses),
        MachineFinding(name="Hugging Face token", found=token, needed_for=("gated and private models",)),
    ]


def _described(name: str) -> str | None:
    """Version of a package, and of a TensorRT which GPUs its plans are for."""
    found = package_version(name)
    if found is None or not name.startswith("tensorrt"):
        return found
    if name == "tensorrt":
        return f"{found}, plans for the GPU that builds them"
    return f"{found}, {RTX_PLANS}" if name.startswith("tensorrt_rtx") else found


def package_version(name: str) -> str | None:
    """Version of a distribution, or of the one with a module of that name, as TensorRT's are named after CUDA too."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    if not name.isidentifier() or find_spec(name) is None:
        return None
    distributions = metadata.packages_distributions().get(name)
    return metadata.version(distributions[0]) if distributions else "of unknown version"


def _tool(name: str) -> str | None:
    """Line of `NAME --version` with the version."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        output = _run(path, "--version", seconds=30).stdout
    except (OSError, subprocess.TimeoutExpired):  # not a program of this machine, or one that hangs
        return path
    lines = [line for line in output.splitlines() if any(character.isdigit() for character in line)]
    release = [line for line in lines if "release" in line]
    return (release or lines or [path])[0].strip()


def plugin_finding() -> MachineFinding:
    """Our plugin library, and whether TensorRT's registry takes it."""
    try:
        from dflash_trt.engine.plans.tensorrt_api import plugin_library

        return load_plugin(plugin_library())
    except MissingDependencyError as error:
        return _no_plugin(error.message, error.hint or "")
    except ImportError as error:  # the compiled module is not built
        return _no_plugin(str(error), "in the source directory: pip install -e .")


def load_plugin(library: Path) -> MachineFinding:
    """Load `library` with this machine's TensorRT in a process of its own, which a wrong library crashes."""
    try:
        command = (sys.executable, "-m", "dflash_trt.engine.plans.load_plugin", str(library))
        result = _run(*command, seconds=PLUGIN_SECONDS)
    except subprocess.TimeoutExpired:
        return _no_plugin(f"{library} did not load within {PLUGIN_SECONDS} s")
    if result.returncode < 0:
        return _no_plugin(f"{library} ended its process by {signal.Signals(-result.returncode).name}")
    if result.returncode > 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        return _no_plugin(f"{library} does not load: {lines[-1]}")
    found = f"{library}, {result.stdout.strip()}"
    return MachineFinding(name="plugin library", found=found, needed_for=("TensorRT plans",))


def _no_plugin(reason: str, fix: str = "build it for this TensorRT, see plugins/README.md") -> MachineFinding:
    return MachineFinding(name=f"plugin library ({reason})", found=None, needed_for=("TensorRT plans",), fix=fix)


def gpu_findings() -> list[MachineFinding]:
    """Driver, CUDA version, GPUs and NVLinks from NVML, without a CUDA context; one finding without a driver."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [_no_gpu(str(error))]
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return [
            MachineFinding(name="NVIDIA driver", found=str(nvml.nvmlSystemGetDriverVersion())),
            MachineFinding(name="CUDA of the driver", found=f"{version // 1000}.{version % 1000 // 10}"),
            *([] if devices else [_no_gpu("the driver reports none")]),
            *(_gpu(nvml, index, device) for index, device in enumerate(devices)),
            *([_links(nvml, devices)] if len(devices) > 1 else []),
        ]
    finally:
        nvml.nvmlShutdown()


def _no_gpu(reason: str) -> MachineFinding:
    fix = "run this on the GPU machine; the driver: https://www.nvidia.com/drivers"
    return MachineFinding(name=f"NVIDIA GPU ({reason})", found=None, needed_for=GPU_NEEDED_FOR, fix=fix)


def _gpu(nvml: Any, index: int, device: Any) -> MachineFinding:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    try:
        memory = f"{nvml.nvmlDeviceGetMemoryInfo(device).total / 2**30:.0f} GiB"
    except nvml.NVMLError_NotSupported:
        memory = "memory shared with the CPU"
    found = f"{nvml.nvmlDeviceGetName(device)}, SM {major}.{minor}, {memory}"
    return MachineFinding(name=f"GPU {index}", found=found, needed_for=GPU_NEEDED_FOR)


def _links(nvml: Any, devices: list[Any]) -> MachineFinding:
    """GPU pairs that reach each other over NVLink; tensor parallelism over PCIe is slow."""
    pairs = list(combinations(range(len(devices)), 2))
    apart = [(a, b) for a, b in pairs if not _is_linked(nvml, devices[a], devices[b])]
    found = f"all {len(pairs)} pairs of {len(devices)} GPUs"
    if apart:
        found = "not between GPUs " + ", ".join(f"{a} and {b}" for a, b in apart)
    if len(apart) == len(pairs):
        found = "none: the GPUs reach each other over PCIe"
    return MachineFinding(name="NVLink", found=found, needed_for=("tensor parallelism",))


def _is_linked(nvml: Any, a: Any, b: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _run(*command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - a program of PATH, or our own module
        command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
    )
