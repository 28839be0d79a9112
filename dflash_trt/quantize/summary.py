# SPDX-License-Identifier: Apache-2.0
"""Tensors and bytes of a draft before and after quantising."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.quantization import Quantization, expected_tensors
from dflash_trt.checkpoint.safetensors_file import BITS_PER_ELEMENT
from dflash_trt.checkpoint.safetensors_writer import Layout, aligned


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of quantising on a checkpoint's tensors."""

    layers: dict[str, int]
    """Linear layers by algorithm."""
    dense_layers: int
    copied_tensors: int
    """Other tensors, byte for byte as they were."""
    source_bytes: int
    """Bytes of all tensors before."""
    output_bytes: int
    """Bytes of all tensors after."""


def summary(draft: DraftCheckpoint, quantization: Quantization) -> Summary:
    """Summary of the quantised tensors of `draft`."""
    modules = draft.spec.linear_modules()
    algorithms = [quantization.modules[module] for module in modules if module in quantization.modules]
    return Summary(
        layers=dict(sorted(Counter(algorithms).items())),
        dense_layers=len(modules) - len(algorithms),
        copied_tensors=len(draft.weights) - len(modules),
        source_bytes=sum(tensor.num_bytes for tensor in draft.weights.values()),
        output_bytes=checkpoint_bytes(draft, quantization),
    )


def tensor_layout(spec: DraftSpec, dtypes: Mapping[str, str], quantization: Quantization) -> Layout:
    """dtype and shape of every tensor that is written; a dense one keeps its dtype of `dtypes`."""
    expected = expected_tensors(spec.tensor_shapes(), quantization, spec.attention_modules())
    return aligned({n: (d[0] if len(d) == 1 else dtypes[n], shape) for n, (d, shape) in expected.items()})


def checkpoint_bytes(draft: DraftCheckpoint, quantization: Quantization) -> int:
    """Bytes of all tensors of `draft` once quantised."""
    layout = tensor_layout(draft.spec, {name: tensor.dtype for name, tensor in draft.weights.items()}, quantization)
    return sum(math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8 for dtype, shape in layout.values())
