# SPDX-License-Identifier: Apache-2.0
"""Layouts of draft checkpoints that a runtime reads."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.checkpoint.dialects.dflash2 import LAYOUT
from dflash_trt.checkpoint.dialects.speculators import SPECULATORS
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig, error
from dflash_trt.deploy.schema import PACKAGES, runtime_keys
from dflash_trt.errors import CheckpointError
from dflash_trt.files.command import command_line

READ = LAYOUT.name
"""Layout that SGLang (models/dflash.py) and TensorRT-LLM (speculative/dflash.py) read, its facts in dflash_config."""


def draft_layout(config: CheckedConfig) -> Iterator[Finding]:
    """Speculators' layout, of which vLLM alone reads the facts; what `convert` makes of it, where it can."""
    draft, runtime = config.draft, config.schema.runtime
    if runtime == "vllm" or draft is None or draft.checkpoint is None:
        return
    checkpoint = draft.checkpoint
    if checkpoint.dialect is not SPECULATORS or config.mode == "engine":
        return
    copy = f"{draft.name.rstrip('/')}-{READ}"
    fix = f"{command_line(['dflash-trt', 'convert', draft.name, '-o', copy, '--to', READ])}, and serve {copy}"
    try:
        LAYOUT.to_config(checkpoint.spec, checkpoint.torch_dtype())
    except CheckpointError as refused:
        fix = f"serve it with vLLM: convert --to {READ} refuses it ({refused.message})"
    yield error(
        "draft-layout", runtime_keys()[runtime].draft,
        f"the layout {READ} (config.json with dflash_config), which {PACKAGES[runtime]} reads", "speculators", fix,
    )  # fmt: skip
