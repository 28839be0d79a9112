# SPDX-License-Identifier: Apache-2.0
"""A draft before `quantize` or `build` writes it; its layers are packed while they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.modelopt_config import claim
from dflash_trt.checkpoint.quantization import HF_QUANT_CONFIG, Quantization, expected_tensors
from dflash_trt.checkpoint.safetensors_writer import Layout, SafetensorsWriter, aligned
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.files.json_file import write_json


class UnwrittenDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A draft checkpoint that is not written yet: its facts, its layout, and what packs and writes its tensors."""

    origin: DraftCheckpoint
    """Checkpoint that it is made from."""
    spec: DraftSpec
    quantization: Quantization
    config: dict[str, object]
    """config.json, in z-lab's layout or our own."""
    hf_quant_config: dict[str, object] | None
    """hf_quant_config.json; None for an unquantised draft."""
    layout: Layout
    """dtype and shape by name, in file order."""
    write_tensors: Callable[[SafetensorsWriter], None]

    def write(self, directory: Path, *, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
        """Writes model.safetensors, with `metadata` in its header, and the configuration into `directory`."""
        with SafetensorsWriter(directory / SINGLE, self.layout, metadata=metadata) as writer:
            self.write_tensors(writer)
        if self.hf_quant_config is not None:
            write_json(directory / HF_QUANT_CONFIG, self.hf_quant_config)
        write_json(directory / "config.json", self.config)


def unchanged(draft: DraftCheckpoint) -> UnwrittenDraft:
    """Copies every tensor of `draft` byte for byte; raises CheckpointError for NaN and infinity."""
    check_finite(draft.weights.values())

    def write(writer: SafetensorsWriter) -> None:
        for tensor in draft.weights.values():
            writer.copy(tensor)

    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in draft.weights.items()}
    config = draft.canonical_config()
    return with_claims(draft, draft.spec, config, draft.quantization, layout=layout, write_tensors=write)


def with_claims(
    origin: DraftCheckpoint, spec: DraftSpec, config: dict[str, object], quantization: Quantization, *, layout: Layout,
    write_tensors: Callable[[SafetensorsWriter], None],
) -> UnwrittenDraft:  # fmt: skip
    """A draft whose configuration claims `quantization`."""
    config, claims = claim(config, quantization, spec.linear_modules())
    return UnwrittenDraft(
        origin=origin,
        spec=spec,
        quantization=quantization,
        config=config,
        hf_quant_config=claims,
        layout=layout,
        write_tensors=write_tensors,
    )


def tensor_layout(spec: DraftSpec, dtypes: Mapping[str, str], quantization: Quantization) -> Layout:
    """dtype and shape of every tensor that is written; a dense one keeps its dtype of `dtypes`."""
    expected = expected_tensors(tensor_shapes(spec), quantization, spec.attention_modules())
    return aligned({n: (d[0] if len(d) == 1 else dtypes[n], shape) for n, (d, shape) in expected.items()})
