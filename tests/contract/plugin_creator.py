# SPDX-License-Identifier: Apache-2.0
"""Asks the real creator for a plugin, as the parser does for each plugin node of a graph.

In TensorRT's own registry (the lean runtime has it and asks for no GPU), in a process that may crash.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import onnx
from onnx import helper

from dflash_trt.engine.plans.tensorrt_api import installed_library

PROGRAM = """
import json, os, sys
import numpy as np
import tensorrt_lean_bindings as trt

KINDS = {"int": (np.int32, trt.PluginFieldType.INT32), "float": (np.float32, trt.PluginFieldType.FLOAT32)}
registry = trt.get_plugin_registry()
registry.load_library(sys.argv[1])
for node in json.load(sys.stdin):
    creator = registry.get_creator(*node["key"])
    if creator is None:
        print(json.dumps("no creator"))
        continue
    listed = {field.name for field in creator.field_names}
    arrays = {name: (np.array([value], KINDS[kind][0]), KINDS[kind][1]) for name, kind, value in node["fields"]}
    fields = [trt.PluginField(name, *arrays[name]) for name in arrays if name in listed]
    plugin = creator.create_plugin(node["name"], trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    unheard = sorted(arrays.keys() - listed)
    print(json.dumps("no plugin" if plugin is None else f"unheard: {unheard}" if unheard else ""))
sys.stdout.flush()
os._exit(0)  # before the library's objects are taken apart
"""


def refusals(nodes: list[onnx.NodeProto]) -> list[str]:
    """For each plugin node, what keeps the parser from making it, with the creator's own message; '' where nothing."""
    command = [sys.executable, "-c", PROGRAM, str(installed_library())]
    asked = json.dumps([_asked(node) for node in nodes])
    result = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
    answers = [str(json.loads(line)) for line in result.stdout.splitlines()]
    return [f"{answer}: {result.stderr.strip()}" if answer == "no plugin" else answer for answer in answers]


def _asked(node: onnx.NodeProto) -> dict[str, Any]:
    """Integers and floats become fields; name, version and namespace find the creator."""
    values = {a.name: (a.type, helper.get_attribute_value(a)) for a in node.attribute}
    _, version = values.pop("plugin_version", (None, b"1"))
    _, namespace = values.pop("plugin_namespace", (None, b""))
    kinds = {onnx.AttributeProto.INT: "int", onnx.AttributeProto.FLOAT: "float"}
    fields = [(name, kinds[kind], value) for name, (kind, value) in values.items()]
    return {"name": node.name, "key": [node.op_type, version.decode(), namespace.decode()], "fields": fields}
