# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX's parser asks the plugin for its output, through the builder of expressions that is TensorRT's own.

Our declaration of IExprBuilder guesses where its table has `constant`; TensorRT's headers do not compile on every
machine, its libraries run on most.
"""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN
from dflash_trt.engine.plans.tensorrt_api import make_logger
from tests.engine.plans.rtx import tensorrt_rtx
from tests.plugins.cases import Case

CASE = Case(name="node", N=6, G=2, D=64)


@pytest.mark.parametrize("axes", [["rows"], ["requests", "block"]], ids=["rows", "requests-block"])
def test_the_output_has_qkvs_axes_and_the_width_of_the_query_heads(axes: list[str]) -> None:
    trt = tensorrt_rtx()
    qkv_width = (CASE.N + 2 * CASE.G) * CASE.D
    types: dict[str, tuple[int, list[str | int]]] = {
        "qkv": (TensorProto.BFLOAT16, [*axes, qkv_width]),
        "q_norm": (TensorProto.BFLOAT16, [CASE.D]),
        "k_norm": (TensorProto.BFLOAT16, [CASE.D]),
        "rope": (TensorProto.FLOAT, ["requests", "block", CASE.D]),
        "context_pointers": (TensorProto.INT64, [1, 2]),
        "context_layout": (TensorProto.INT64, [6]),
        "page_table": (TensorProto.INT32, [4, "pages"]),
        "slot_ids": (TensorProto.INT32, ["requests"]),
        "context_lengths": (TensorProto.INT32, ["requests"]),
    }
    node = helper.make_node(
        ATTENTION, list(types), ["out"], domain=PLUGIN_DOMAIN, plugin_namespace=PLUGIN_DOMAIN,
        plugin_version=PLUGIN_VERSION, **CASE.attributes(),
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, *type_) for name, type_ in types.items()]
    output = helper.make_tensor_value_info("out", TensorProto.BFLOAT16, None)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, [output]), opset_imports=opsets, ir_version=11
    )
    builder = trt.Builder(make_logger(trt))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, make_logger(trt))
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    assert list(network.get_output(0).shape) == [-1] * len(axes) + [CASE.N * CASE.D]
