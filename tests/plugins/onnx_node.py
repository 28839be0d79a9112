# SPDX-License-Identifier: Apache-2.0
"""The attention node alone in ONNX Runtime."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from dflash_trt import _C
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN
from tests.plugins.cases import Case
from tests.plugins.tensors import Tensors

INTEGERS = ("page_ids", "context_lengths")
Feeds = dict[str, np.ndarray]


def feeds_of(case: Case, tensors: Tensors) -> Feeds:
    """The lowered node's inputs: FLOAT caches with the scales multiplied out, a slot as one page, the bias added."""
    values = {field.name.replace("slot_ids", "page_ids"): getattr(tensors, field.name) for field in fields(tensors)}
    values["k_cache"] = values["k_cache"].float() * case.k_scale
    values["v_cache"] = values["v_cache"].float() * case.v_scale
    values["page_ids"] = values["page_ids"][:, None]
    if (bias := values.pop("qkv_bias")) is not None:
        values["qkv"] = values["qkv"].float() + bias.float()
    present = {name: value for name, value in values.items() if value is not None}
    return {name: (value if name in INTEGERS else value.float()).numpy() for name, value in present.items()}


def session(case: Case, feeds: Feeds, isa: str = "best", num_threads: int = 1) -> onnxruntime.InferenceSession:
    """The node, on an instruction set."""
    types = {name: TensorProto.INT32 if name in INTEGERS else TensorProto.FLOAT for name in feeds}
    node = helper.make_node(
        ATTENTION, list(feeds), ["out"], domain=PLUGIN_DOMAIN, plugin_namespace=PLUGIN_DOMAIN,
        plugin_version=PLUGIN_VERSION, **case.attributes(), instruction_set=isa,
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, types[name], None) for name in feeds]
    graph = helper.make_graph(
        [node], "attention", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.register_custom_ops_library(_C.__file__)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(case: Case, feeds: Feeds, isa: str = "best", num_threads: int = 1) -> np.ndarray:
    """The output of `session`."""
    (out,) = session(case, feeds, isa, num_threads).run(None, feeds)
    return out
