# SPDX-License-Identifier: Apache-2.0
"""Refuses a reference or features that are no measure for an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import CheckpointError, EngineError
from dflash_trt.quantize.bounds import CAPTURE

if TYPE_CHECKING:
    from dflash_trt.runtime.measure.features import FeatureFacts

DIFFERENT = {("draft", "model_type"), ("draft", "draft_vocab_size")}
REPLAYED = ("target_layer_ids", "num_draft_tokens", "vocab_size")
"""Facts in which drafts of two kinds agree that are replayed on the same answers."""


def check_reference(manifest: Manifest, reference: Manifest, name: str, *, is_replayed: bool = False) -> None:
    """Raises EngineError when `reference`, called `name`, is no measure for `manifest`'s engine.

    model_type may differ, which `quantize` changes, and so may the head, which `build --head` adds. Replayed answers
    also compare drafts of two kinds, as LiLiCorr with DFlash, with the same taps and block length.
    """
    hint = "give --reference an engine built from the unquantised checkpoint of the same draft"
    is_other = is_replayed and manifest.draft.kind != reference.draft.kind
    for part, facts in (("draft", DraftSpec), ("target", TargetSpec)):
        names = [fact for fact in facts.__struct_fields__ if (part, fact) not in DIFFERENT]
        names = [*REPLAYED] if is_other and part == "draft" else names
        if difference := _difference(names, getattr(manifest, part), getattr(reference, part)):
            raise EngineError(f"reference {name} is an engine of another {part}: {difference}", hint=hint)
    quantization = reference.quantization
    if quantization.algorithms():
        modules = [f"{algorithm} in {module}" for module, algorithm in quantization.modules.items()]
        found = f"{modules[0]} ({len(modules)} quantised modules)" if modules else "an FP8 context cache"
        raise EngineError(f"reference {name}: expected an unquantised engine, found {found}", hint=hint)


def check_features(manifest: Manifest, facts: FeatureFacts, features: str, engine: str) -> None:
    """Raises CheckpointError when `features` were captured from another target than `engine` was built for."""
    if difference := _difference(TargetSpec.__struct_fields__, manifest.target, facts.target):
        raise CheckpointError(
            f"{features} was captured from {facts.target_name}, another target than {engine} was built for:"
            f" {difference}",
            hint=f"capture with the engine's target: {CAPTURE}",
        )


def _difference(names: Iterable[str], expected: object, actual: object) -> str | None:
    """The first of the facts `names` that is not the same in both, in words."""
    pairs = ((name, getattr(expected, name), getattr(actual, name)) for name in names)
    return next((_in_words(name, a, b) for name, a, b in pairs if a != b), None)


def _in_words(name: str, expected: object, actual: object) -> str:
    """Values of a fact, of structures and of lists of them only the parts that differ."""
    if isinstance(expected, msgspec.Struct) and type(expected) is type(actual):
        parts = [part for part in expected.__struct_fields__ if getattr(expected, part) != getattr(actual, part)]
        prefix = f"{name}." if name else ""
        words = (_in_words(f"{prefix}{part}", getattr(expected, part), getattr(actual, part)) for part in parts)
        return "; ".join(words)
    if name == "layers" and isinstance(expected, tuple) and isinstance(actual, tuple):
        if len(expected) != len(actual):
            return f"number of layers: expected {len(expected)}, found {len(actual)}"
        groups: dict[str, list[str]] = {}
        for layer, (a, b) in enumerate(zip(expected, actual, strict=True)):
            if a != b:
                groups.setdefault(_in_words("", a, b), []).append(str(layer))
        return "; ".join(f"layers {', '.join(layers)}: {words}" for words, layers in groups.items())
    return f"{name}: expected {_value(expected)}, found {_value(actual)}"


def _value(value: object) -> object:
    """A value as people write it: a structure as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, msgspec.Struct) else value
