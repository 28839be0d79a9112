# SPDX-License-Identifier: Apache-2.0
"""Whether an engine may be measured against another, and on a file of features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import CheckpointError, EngineError
from dflash_trt.quantize.ranges import CAPTURE

if TYPE_CHECKING:
    from dflash_trt.quantize.features import FeatureFacts

DIFFERENT = {("draft", "model_type"), ("draft", "draft_vocab_size")}


def check_reference(manifest: Manifest, reference: Manifest, name: str) -> None:
    """Raises EngineError when `reference`, called `name`, is no measure for `manifest`'s engine.

    model_type may differ, which `quantize` changes, and so may the head, which `build --head` adds.
    """
    hint = "give --reference an engine built from the unquantised checkpoint of the same draft"
    for part, kind in (("draft", DraftSpec), ("target", TargetSpec)):
        for fact in kind.__struct_fields__:
            if (part, fact) in DIFFERENT:
                continue
            expected, found = (getattr(getattr(m, part), fact) for m in (manifest, reference))
            if expected != found:
                raise EngineError(
                    f"reference {name} is an engine of another {part}: {fact}: expected {expected}, found {found}",
                    hint=hint,
                )
    if modules := reference.quantization.modules:
        module, algorithm = next(iter(modules.items()))
        raise EngineError(
            f"reference {name}: expected an unquantised engine, found {algorithm} in {module}"
            f" ({len(modules)} quantised modules)",
            hint=hint,
        )
    if reference.quantization.fp8_kv_cache:
        raise EngineError(f"reference {name}: expected an unquantised engine, found an FP8 context cache", hint=hint)


def check_features(manifest: Manifest, facts: FeatureFacts, features: str, engine: str) -> None:
    """Raises CheckpointError when `features` were captured from another target than `engine` was built for."""
    for fact in TargetSpec.__struct_fields__:
        expected, found = getattr(manifest.target, fact), getattr(facts.target, fact)
        if expected != found:
            raise CheckpointError(
                f"{features} was captured from {facts.target_name}, another target than {engine} was built for:"
                f" {fact}: expected {expected}, found {found}",
                hint=f"capture with the engine's target: {CAPTURE}",
            )
