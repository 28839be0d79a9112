# SPDX-License-Identifier: Apache-2.0
"""Reads the names, arguments and enum members that a version of TensorRT's Python bindings offers.

    pip download --no-deps tensorrt_cu13_bindings==10.15.1.29 && unzip it to DIR
    python -m tests.contract.read_bindings DIR >tests/contract/tensorrt-10.15.1.29.json

The bindings ask three libraries for nine functions and nothing else, so stubs of those are enough to import them
where no libnvinfer is; pybind11's docstrings then carry every signature.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "tensorrt_bindings"
CLASSES = (
    "Builder", "IBuilderConfig", "INetworkDefinition", "IOptimizationProfile", "IHostMemory", "ITimingCache",
    "OnnxParser", "ParserError", "IProgressMonitor", "Logger", "IPluginRegistry", "IPluginCreatorV3One", "IPluginV3",
    "PluginField", "PluginFieldCollection", "Runtime", "ICudaEngine", "IExecutionContext", "EngineInspector",
    "IRuntimeConfig", "IRuntimeCache",
)  # fmt: skip
ENUMS = (
    "BuilderFlag", "ComputeCapability", "CudaGraphStrategy", "DynamicShapesKernelSpecializationStrategy",
    "ExecutionContextAllocationStrategy", "HardwareCompatibilityLevel", "LayerInformationFormat",
    "MemoryPoolType", "NetworkDefinitionCreationFlag", "PluginFieldType", "ProfilingVerbosity", "TensorIOMode",
    "TensorRTPhase",
)  # fmt: skip
FUNCTIONS = ("get_plugin_registry",)
STUBS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip


def describe(trt: Any) -> dict[str, Any]:
    """The offer of an imported module."""
    return {
        "version": trt.__version__,
        "source": "tensorrt_cu13_bindings, docstrings of tensorrt.so",
        "classes": {name: _describe_class(getattr(trt, name)) for name in CLASSES if hasattr(trt, name)},
        "enums": {name: sorted(getattr(trt, name).__members__) for name in ENUMS if hasattr(trt, name)},
        "functions": {name: _overloads(getattr(trt, name)) for name in FUNCTIONS},
    }


def _describe_class(cls: type) -> dict[str, Any]:
    described: dict[str, Any] = {"attributes": [], "writable": [], "methods": {}}
    for name in sorted({*vars(cls), "__init__"}):
        member = getattr(cls, name)
        if name.startswith("_") and name != "__init__":
            continue
        if not callable(member):
            described["writable" if getattr(member, "fset", None) else "attributes"].append(name)
        elif overloads := _overloads(member):
            described["methods"][name] = overloads
    return described


def _overloads(function: Any) -> list[list[str]]:
    """Argument names of each overload, without self; an argument with a default ends in '='."""
    name = function.__name__
    signatures = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) ->", function.__doc__ or "", re.MULTILINE)
    return [_arguments(signature) for signature in signatures if not signature.startswith("*args")]


def _arguments(signature: str) -> list[str]:
    flat = re.sub(r"\[[^\]]*\]|<[^>]*>", "", signature)  # commas inside types and defaults
    names = [part.partition(":") for part in flat.split(", ") if part]
    return [f"{name}=" if " =" in rest else name for name, _, rest in names if name != "self"]


def _import(directory: Path) -> Any:
    major = next(directory.glob("*.dist-info")).name.split("-")[1].split(".")[0]
    with tempfile.TemporaryDirectory() as stubs:
        source = Path(stubs, "stubs.c")
        source.write_text("".join(f"void* {name}(void) {{ return 0; }}\n" for name in STUBS))
        for library in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
            file = f"lib{library}.so.{major}"
            command = ["cc", "-shared", "-fPIC", str(source), "-o", f"{stubs}/{file}", f"-Wl,-soname,{file}"]
            subprocess.run(command, check=True)
        environment = os.environ | {"LD_LIBRARY_PATH": stubs, "PYTHONPATH": f"{directory}:{Path.cwd()}"}
        script = f"import json, {PACKAGE}; from {__spec__.name} import describe; print(json.dumps(describe({PACKAGE})))"
        return json.loads(subprocess.run([sys.executable, "-c", script], env=environment, check=True, stdout=-1).stdout)


if __name__ == "__main__":
    text = json.dumps(_import(Path(sys.argv[1])), indent=1)
    lists = r"\[\s+([^\[\]]*?)\s+\]"
    for _ in range(2):  # the arguments of an overload, then the overloads: one line each
        text = re.sub(lists, lambda match: f"[{' '.join(match[1].split())}]", text)
        lists = r"\[\s+((?:\[[^\]]*\],?\s+)+)\]"
    print(text)
