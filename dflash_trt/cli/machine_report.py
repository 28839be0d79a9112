# SPDX-License-Identifier: Apache-2.0
"""What this machine has, what is missing for which command, and the command that fixes it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

from dflash_trt.cli.gpu_report import MachineFinding, gpus
from dflash_trt.cli.plugin_report import plugin_library
from dflash_trt.files.processor import cpu_model

RUNNING = ("generate", "chat", "serve", "verify", "capture", "dynamo")
DYNAMO = "pip install 'dflash-trt[dynamo]' && pip install --no-deps ai-dynamo==1.6.1"
# A package, the commands that need it, and the extra of pyproject.toml that brings it.
PACKAGES = {
    "onnx": (("build", *RUNNING), "pip install 'dflash-trt[run]'"),
    "onnxruntime": ((*RUNNING, "quantize --calibration"), "pip install 'dflash-trt[run]'"),
    "torch": ((*RUNNING, "search", "recover", "quantize --calibration"), "pip install 'dflash-trt[run]'"),
    "transformers": (RUNNING, "pip install 'dflash-trt[run]'"),
    "nvidia-modelopt": (("quantize --calibration",), "pip install 'dflash-trt[calibrate]'"),
    "matplotlib": (("bench report", "estimate --html", "--plot"), "pip install 'dflash-trt[observe]'"),
    "starlette": (("serve",), "pip install 'dflash-trt[serve]'"),
    "xgrammar": (("structured outputs",), "pip install 'dflash-trt[serve]'"),
    "opentelemetry-sdk": (("traces of serve",), "pip install 'dflash-trt[serve]'"),
    "httpx": (("doctor URL", "bench run"), "pip install 'dflash-trt[observe]'"),
    "tritonclient": (("triton-repo",), "pip install 'dflash-trt[triton]'"),
    "mpi4py": (("doctor --ranks", "mpiexec instead of torchrun"), "pip install mpi4py mpich"),
    "ai-dynamo-runtime": (("dynamo",), f"in an environment of its own: {DYNAMO}"),
    "tensorrt": (("TensorRT plans",), "on the GPU machine: pip install 'dflash-trt[tensorrt]'"),
    "tensorrt_llm": (("serving with TensorRT-LLM",), "in an environment of its own: pip install 'dflash-trt[trtllm]'"),
}
TOOLS = {
    "c++": (("installing from source",), "apt-get install g++"),
    "nvcc": (("the CUDA plugin",), "install the CUDA toolkit: https://developer.nvidia.com/cuda-downloads"),
}


def examine() -> list[MachineFinding]:
    """Looks at Python, packages, tools, plugin and GPUs; loads none of them and never fails for what is missing."""
    return [
        MachineFinding(name="Python", found=platform.python_version()),
        MachineFinding(name="CPU", found=f"{platform.machine()}, {cpu_model()}"),
        *(
            MachineFinding(name=name, found=package_version(name), needed_for=commands, fix=fix)
            for name, (commands, fix) in PACKAGES.items()
        ),
        *(
            MachineFinding(name=name, found=_tool(name), needed_for=commands, fix=fix)
            for name, (commands, fix) in TOOLS.items()
        ),
        plugin_library(),
        *gpus(),
    ]


def package_version(name: str) -> str | None:
    """Version of a distribution, or of the one that brings a module of that name: TensorRT's are named after CUDA too.

    None where there is neither.
    """
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    if not name.isidentifier() or find_spec(name) is None:
        return None
    brings = metadata.packages_distributions().get(name)
    return metadata.version(brings[0]) if brings else "of unknown version"


def _tool(name: str) -> str | None:
    """The line of `NAME --version` that carries the version."""
    path = shutil.which(name)
    if path is None:
        return None
    command = [path, "--version"]
    try:
        result = subprocess.run(  # noqa: S603 - a program of PATH, asked its version
            command, capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # not a program of this machine, or one that hangs
        return path
    lines = [line for line in result.stdout.splitlines() if any(character.isdigit() for character in line)]
    release = [line for line in lines if "release" in line]
    return (release or lines or [path])[0].strip()
