# SPDX-License-Identifier: Apache-2.0
"""Engines of every dialect, recipe and head, of a size whose attention the plugin takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.manifest import Manifest
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.engine.graph.test_features import CASES
from tests.engines import build
from tests.featured import build_featured, featured_draft
from tests.reference.synthetic import DraftSizes, write_random_draft

SIZES = DraftSizes(hidden=64, intermediate=96, head_dim=64, vocab_size=96)
"""Extents that 16 and 32 divide, which FP8 and FP4 products want."""
TRIMMED = 40
Maker = Callable[[Path], Manifest]


def featured(directory: Path, *, facts: dict[str, Any], **options: Any) -> Manifest:
    """The draft of write_random_draft with these options and other facts."""
    base = write_random_draft(directory / "base", sizes=SIZES, **options)
    rows = facts.get("draft_vocab_size")
    tensors = {"d2t": 2 * torch.arange(rows) - torch.arange(rows)} if rows == TRIMMED else {}
    return build_featured(featured_draft(base, directory / "draft", facts, tensors), directory / "engine")


def written(directory: Path, **options: Any) -> Manifest:
    """The draft of write_random_draft with these options."""
    write_random_draft(directory / "draft", sizes=SIZES, **options)
    return build(directory / "draft", directory / "engine")


def quantized(directory: Path, *, recipe: str) -> Manifest:
    base = write_random_draft(directory / "base", dialect="gpt_oss", sizes=SIZES)
    quantize_checkpoint(read_draft(base), load_recipe(recipe), directory / "draft")
    return build(directory / "draft", directory / "engine")


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
RECIPES = ("fp8", "fp8+fp8-kv", "nvfp4", "nvfp4-native", "nvfp4-w4a16", "mixed-nvfp4-fp8")
MAKERS: dict[str, Maker] = {
    "gpt-oss": partial(written, dialect="gpt_oss"),
    "windows": partial(written, dialect="qwen3", layer_types=SLIDING, sliding_window=7, is_causal=True),
    "float16": partial(written, dialect="gpt_oss", dtype=torch.float16),
    "float32": partial(written, dialect="qwen3", dtype=torch.float32),
    "DFlash2": partial(written, dialect="qwen3", dflash2=True),
    "DSpark": partial(written, dialect="qwen3", dspark="gated"),
    "DSpark with its own head": partial(written, dialect="qwen3", dspark="vanilla", own_vocabulary=True),
    "LiLiCorr": partial(written, dialect="qwen3", lilicorr="convolved"),
    "LiLiCorr with its own head": partial(written, dialect="qwen3", lilicorr="plain", own_vocabulary=True),
    "capped logits": partial(
        featured,
        dialect="qwen3",
        dflash2=True,
        facts={"draft_vocab_size": 96, "final_logit_softcapping": 5.0, "output_multiplier": 0.5},
    ),
    "own head": partial(featured, dialect="gpt_oss", facts={"draft_vocab_size": 96}),
    "trimmed head": partial(featured, dialect="qwen3", facts={"draft_vocab_size": TRIMMED}),
    **{recipe: partial(quantized, recipe=recipe) for recipe in RECIPES},
    **{case.name: partial(featured, dialect=case.dialect, facts=case.facts) for case in CASES},
}
QUICK = (
    "gpt-oss",
    "capped logits",
    "trimmed head",
    "DSpark with its own head",
    "LiLiCorr with its own head",
    "fp8+fp8-kv",
    "mixed-nvfp4-fp8",
    "Laguna",
)
"""Together they hold every operator."""


def parameters(quick: Collection[str]) -> list[ParameterSet]:
    """All makers; those that are not `quick` for the full run."""
    marks = {name: () if name in quick else pytest.mark.full for name in MAKERS}
    return [pytest.param(make, id=name, marks=marks[name]) for name, make in MAKERS.items()]
