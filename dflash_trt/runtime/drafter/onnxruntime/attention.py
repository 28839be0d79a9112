# SPDX-License-Identifier: Apache-2.0
"""DFlashKVInjectionAttention in standard ops, for ONNX Runtime on a GPU, and to test against.

On a CPU the node is an operator of its own, `cpp/onnxruntime/attention_op.cpp`.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

import onnx

from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN
from dflash_trt.errors import EngineError
from dflash_trt.files.read import read_text

WITH_SINKS = f"{ATTENTION}WithSinks"
NUM_INPUTS = 8
"""Inputs of the function without sinks; caches and page_ids replace the node's pointers, layout and page table."""
MAX_BYTES = 2**16


def function_text(file: str, /, **values: object) -> str:
    """FILE.onnxtxt in this folder, in ONNX's text syntax, with `values` substituted for their names."""
    text = read_text(Path(__file__).with_name(f"{file}.onnxtxt"), EngineError, limit=MAX_BYTES)
    return Template(text).substitute(values)


def attention_function(*, with_sinks: bool) -> onnx.FunctionProto:
    """DFlashKVInjectionAttention in standard ops: FLOAT qkv and caches; with the ninth input it has another name."""
    body = function_text(
        "attention",
        opset=OPSET,
        domain=PLUGIN_DOMAIN,
        name=WITH_SINKS if with_sinks else ATTENTION,
        sinks=", sinks" if with_sinks else "",
        softmax=function_text("attention_softmax_with_sinks" if with_sinks else "attention_softmax"),
        norm_and_rotate_q=function_text("attention_heads", x="q", heads="N_1"),
        norm_and_rotate_k=function_text("attention_heads", x="k", heads="G_1"),
    )
    return onnx.parser.parse_function(body)
