# SPDX-License-Identifier: Apache-2.0
"""Drafts with facts that z-lab's v1 checkpoints do not have, made of one that is there and random tensors besides."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.manifest import Manifest, read_manifest
from tests.engines import fitting_target


def featured_draft(
    base: Path,
    output: Path,
    facts: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
) -> DraftCheckpoint:
    """The draft `base` with other `facts` (fields of DraftSpec), as any reader would return it.

    Tensors that they demand and that are not among `tensors` are random BF16 ones, far from 0.
    """
    draft = read_draft(base)
    spec = msgspec.structs.replace(draft.spec, **facts)
    generator = torch.Generator().manual_seed(seed)
    output.mkdir(parents=True)
    shutil.copyfile(base / "config.json", output / "config.json")
    had, needs = load_file(base / "model.safetensors"), tensor_shapes(spec)
    made = {}
    for name, shape in needs.items():
        if name in had and had[name].shape == shape:
            made[name] = had[name]
        else:
            scale = shape[1] ** -0.5 if len(shape) == 2 else 1.0
            made[name] = (scale * (0.5 + torch.randn(shape, generator=generator))).bfloat16()
    save_file(made | dict(tensors or {}), output / "model.safetensors")
    return msgspec.structs.replace(
        draft, directory=output, spec=spec, config=read_draft(base).config, weights=read_weights(output)
    )


def build_featured(draft: DraftCheckpoint, output: Path, target: Path | None = None) -> Manifest:
    """Builds its engine, for `target` or for one that just fits."""
    partner = read_target(target) if target else fitting_target(draft)
    build_engine(BuildOptions(draft=draft, draft_name=str(draft.directory), target=partner, output=output))
    return read_manifest(output)
