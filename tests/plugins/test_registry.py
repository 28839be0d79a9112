# SPDX-License-Identifier: Apache-2.0
"""The plugin library: what it exports and needs, how it is found, and that TensorRT's own plugin registry takes it.

The lean runtime (tensorrt_lean_cu13_bindings 11.4) has the registry and asks for no GPU. It is in a process of its own
each time: a crash fails a test only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from dflash_trt import _C
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION, draft_graph
from dflash_trt.engine.plans import tensorrt_api as plugin
from dflash_trt.engine.plans.tensorrt_api import installed_library, plugin_library
from dflash_trt.errors import MissingDependencyError
from tests.paths import REPOSITORY
from tests.waiting import PATIENCE


def symbols(library: Path | str, option: str) -> set[str]:
    """Names in a library's dynamic symbol table."""
    if shutil.which("nm") is None:
        pytest.skip("no nm: install binutils")
    command = ["nm", "-D", "--format=just-symbols", option, str(library)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_libraries_export_what_is_looked_up_and_need_nothing_else() -> None:
    assert symbols(installed_library(), "--defined-only") == {
        "getCreators", "setLoggerFinder", "dflash_host_code", "dflash_cuda_architectures",
        "dflash_experimental_kernels", "dflash_launch_attention", "dflash_launch_append",
    }  # fmt: skip
    # A C++ library that a compiler links in shares no symbol with the one that torch has loaded
    assert symbols(_C.__file__, "--defined-only") == {"PyInit__C", "RegisterCustomOps"}
    foreign = ("nvinfer", "getPluginRegistry", "getLogger", "cuda", "cu")
    needed = symbols(installed_library(), "--undefined-only")
    assert needed
    assert [name for name in needed if name.startswith(foreign) or "nvinfer" in name] == []


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)


def test_the_variable_names_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libother.so"
    library.touch()
    monkeypatch.setenv(plugin.VARIABLE, str(library))
    assert plugin_library() == library
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path))
    with pytest.raises(MissingDependencyError, match=f"DFLASH_TRT_PLUGIN: no plugin library at {tmp_path}\n"):
        plugin_library()


def test_the_installed_library_counts_only_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_architectures", lambda: ["90a"])
    assert plugin_library() == installed_library()
    monkeypatch.setattr(_C, "cuda_architectures", lambda: [])
    with pytest.raises(
        MissingDependencyError, match=r"built without CUDA kernels\nhint: .*pip install .*DFLASH_CUDA=ON"
    ):
        plugin_library()


def test_no_installed_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "installed_library", lambda: tmp_path / "none.so")
    with pytest.raises(MissingDependencyError, match=r"no plugin library at .*\nhint: cmake"):
        plugin_library()


NO_LEAN = "pip install -e '.[dev]' has it on Linux x86-64"
# Plugins and creators go before their library does, or the process crashes at its end.
PROGRAM = """
import sys
import numpy as np
import tensorrt_lean_bindings as trt

alive = []  # a PluginField points to its array's data and does not keep it

def fields(values):
    kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    made = []
    for name, value in values.items():
        dtype, kind = kinds[type(value)]
        alive.append(np.array([value], dtype=dtype))
        made.append(trt.PluginField(name, alive[-1], kind))
    return trt.PluginFieldCollection(made)

def main():
    registry = trt.get_plugin_registry()
    library = registry.load_library(sys.argv[1])
    with_creator(registry.get_creator("DFlashKVInjectionAttention", "5", "dflash_trt"))
    registry.deregister_library(library)
    assert registry.get_creator("DFlashKVInjectionAttention", "5", "dflash_trt") is None

values = {
    "layer": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "softmax_scale": 0.125,
    "sliding_window": 0, "causal": 0, "k_scale": 1.0, "v_scale": 1.0, "fp8_cache": 0, "has_qkv_bias": 0,
    "fp8_output": 0, "output_scale": 1.0,
}
"""


def in_tensorrt(body: str) -> subprocess.CompletedProcess[str]:
    """Runs `body`, the definition of with_creator(creator), and unloads the library afterwards."""
    pytest.importorskip("tensorrt_lean_bindings", reason=NO_LEAN)
    program = f"{PROGRAM}\n{body}\nmain()\nprint('unloaded')\n"
    command = [sys.executable, "-c", program, str(installed_library())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("unloaded\n")
    return result


def test_the_creator_is_found_and_refuses_a_wrong_field() -> None:
    body = """
def with_creator(creator):
    print(creator.name, creator.plugin_version, creator.plugin_namespace, creator.interface_info.kind)
"""
    assert in_tensorrt(body).stdout.startswith("DFlashKVInjectionAttention 5 dflash_trt PLUGIN CREATOR_V3ONE\n")
    # tests/plugins/test_glue.py has all of them
    body = """
def with_creator(creator):
    print(creator.create_plugin("layers.1", fields(values | {"paged": 1}), trt.TensorRTPhase.BUILD))
"""
    result = in_tensorrt(body)
    assert result.stdout.startswith("None\n")
    assert "[dflash_trt] layers.1: field paged: not an attribute of this plugin\n" in result.stderr


def enumerators(name: str) -> dict[str, int]:
    """Enumerators of plugins/tensorrt_abi/interface.h, without their k."""
    header = (REPOSITORY / "plugins" / "tensorrt_abi" / "interface.h").read_text()
    (body,) = re.findall(rf"enum class {name} : int32_t {{(.*?)}};", header, re.DOTALL)
    return {key: int(value) for key, value in re.findall(r"k(\w+) = (\d+)", body)}


def test_enumerators_have_tensorrts_values() -> None:
    """No wheel has NvInfer.h; its binding has the values under the same names."""
    names = ("DataType", "PluginFieldType", "TensorRTPhase", "PluginCapabilityType")
    pytest.importorskip("tensorrt_lean_bindings", reason=NO_LEAN)
    listed = f"print(n, k, int(v)) for n in {names} for k, v in getattr(t, n).__members__.items()"
    program = f"import tensorrt_lean_bindings as t; [{listed}]"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    values = {(name, key): int(value) for name, key, value in map(str.split, told.splitlines())}
    for name in names:
        expected = enumerators(name)
        assert expected
        assert {key: values.get((name, key)) for key in expected} == expected


def test_a_plugin_is_made_and_answers_for_its_capabilities() -> None:
    body = """
def with_creator(creator):
    plugin = creator.create_plugin("layer", fields(values), trt.TensorRTPhase.BUILD)
    kinds = trt.PluginCapabilityType
    core, build, runtime = map(plugin.get_capability_interface, (kinds.CORE, kinds.BUILD, kinds.RUNTIME))
    print(core.plugin_name, core.plugin_version, core.plugin_namespace)
    print(build.num_outputs)
    for capability in (core, build, runtime, plugin):
        print(capability.interface_info.kind, capability.api_language)
"""
    assert in_tensorrt(body).stdout.splitlines()[:-1] == [
        "DFlashKVInjectionAttention 5 dflash_trt", "1", "PLUGIN_V3ONE_CORE APILanguage.CPP",
        "PLUGIN_V3ONE_BUILD APILanguage.CPP", "PLUGIN_V3ONE_RUNTIME APILanguage.CPP", "PLUGIN APILanguage.CPP",
    ]  # fmt: skip


def test_every_node_of_the_graph_makes_a_plugin(draft_dir: Path) -> None:
    """The graph's attributes are the creator's fields, but for the two by which the ONNX parser finds the creator."""
    graph = draft_graph(read_draft(draft_dir)).graph
    nodes = [node for node in graph.node if node.op_type == ATTENTION]
    assert nodes
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    for node in attributes:
        assert (node.pop("plugin_namespace"), node.pop("plugin_version")) == (b"dflash_trt", PLUGIN_VERSION.encode())
    body = f"""
def with_creator(creator):
    for node in {attributes!r}:
        print(sorted(field.name for field in creator.field_names) == sorted(node))
        node["head_dim"] = 64  # the small draft's own is below what a kernel takes
        plugin = creator.create_plugin("layer", fields(node), trt.TensorRTPhase.BUILD)
        print(plugin is not None)
        del plugin
"""
    assert in_tensorrt(body).stdout == "True\n" * 2 * len(nodes) + "unloaded\n"
