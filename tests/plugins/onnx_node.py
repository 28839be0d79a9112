# SPDX-License-Identifier: Apache-2.0
"""The attention node alone in ONNX Runtime: as standard operators, or as the compiled operator."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import onnx.inliner
import onnxruntime
from onnx import TensorProto, helper

from dflash_trt import _C
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN
from dflash_trt.runtime.drafter.onnxruntime.lowering import WITH_SINKS, attention_function
from tests.plugins.cases import Case
from tests.plugins.tensors import Tensors

INTEGERS = ("page_ids", "context_lengths")
Feeds = dict[str, np.ndarray]


def feeds_of(case: Case, tensors: Tensors) -> Feeds:
    """The lowered node's inputs: FLOAT caches with the scales multiplied out, a slot as one page."""
    values = {field.name.replace("slot_ids", "page_ids"): getattr(tensors, field.name) for field in fields(tensors)}
    values["k_cache"] = values["k_cache"].float() * case.k_scale
    values["v_cache"] = values["v_cache"].float() * case.v_scale
    values["page_ids"] = values["page_ids"][:, None]
    present = {name: value for name, value in values.items() if value is not None}
    return {name: (value if name in INTEGERS else value.float()).numpy() for name, value in present.items()}


def session(case: Case, feeds: Feeds, isa: str | None = None, num_threads: int = 1) -> onnxruntime.InferenceSession:
    """The node as the compiled operator for `isa`, or without one as the ONNX function."""
    types = {name: TensorProto.INT32 if name in INTEGERS else TensorProto.FLOAT for name in feeds}
    has_sinks = "sinks" in feeds
    extra = {} if isa is None else {"instruction_set": isa}
    node = helper.make_node(
        WITH_SINKS if isa is None and has_sinks else ATTENTION, list(feeds), ["out"], domain=PLUGIN_DOMAIN,
        plugin_namespace=PLUGIN_DOMAIN, plugin_version=PLUGIN_VERSION, **case.attributes(), **extra,
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, types[name], None) for name in feeds]
    graph = helper.make_graph(
        [node], "attention", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    functions = [attention_function(with_sinks=has_sinks)] if isa is None else []
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    if isa is None:
        model = onnx.inliner.inline_local_functions(model)
    else:
        options.register_custom_ops_library(_C.__file__)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(case: Case, feeds: Feeds, isa: str | None = None, num_threads: int = 1) -> np.ndarray:
    """The output of `session`."""
    (out,) = session(case, feeds, isa, num_threads).run(None, feeds)
    return out
