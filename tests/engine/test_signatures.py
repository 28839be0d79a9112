# SPDX-License-Identifier: Apache-2.0
"""The signatures of both graphs, written out for one draft."""

from __future__ import annotations

import pytest

from dflash_trt.deploy.published import published_drafts
from dflash_trt.engine.signatures import Port, graph_signatures

# 8 layers, 5 taps, hidden 2880, 8 kv-heads of 64, blocks of 10.
GPT_OSS = published_drafts()["z-lab/gpt-oss-120b-DFlash"].spec


@pytest.mark.parametrize(("fp8_cache", "cached"), [(False, "BFLOAT16"), (True, "FLOAT8E4M3FN")])
def test_signatures(fp8_cache: bool, cached: str) -> None:
    graphs = graph_signatures(GPT_OSS, fp8_cache=fp8_cache)
    found = {
        name: [(port.name, port.dtype, port.shape) for port in (*graph.inputs, *graph.outputs)]
        for name, graph in graphs.items()
    }
    assert found == {
        "context": [
            ("target_hidden", "BFLOAT16", ("T", 14400)),
            ("positions", "INT32", ("T",)),
            ("k", cached, ("T", 8, 8, 64)),
            ("v", cached, ("T", 8, 8, 64)),
        ],
        "draft": [
            ("noise_embeds", "BFLOAT16", ("B", 10, 2880)),
            ("positions", "INT32", ("B", 10)),
            ("context_pointers", "INT64", (8,)),
            ("context_layout", "INT64", (5,)),
            ("page_table", "INT32", ("slots", "pages")),
            ("slot_ids", "INT32", ("B",)),
            ("context_lengths", "INT32", ("B",)),
            ("hidden", "BFLOAT16", ("B", 10, 2880)),
        ],
    }
    assert [(graph.file, len(graph.outputs)) for graph in graphs.values()] == [("context.onnx", 2), ("draft.onnx", 1)]


def test_sizes() -> None:
    port = Port(name="k_cache", dtype="BFLOAT16", shape=("slots", 8, "C_max", 2, 64))
    assert port.sizes({"slots": 3, "C_max": 100, "B": 7}) == [3, 8, 100, 2, 64]
