# SPDX-License-Identifier: Apache-2.0
"""The interfaces of a dialect: `Dialect` reads drafts, `Layout` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.dialects.keys import refuse_unread
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one family of exporters writes DFlash drafts."""

    name: str
    recognises: Callable[[Facts], bool]
    """Whether a config.json is of this dialect; it only looks at keys and never raises."""
    read: Callable[[Facts, Weights], DraftSpec]
    """The facts, from config.json and, where it does not say, from which tensors there are.

    Raises CheckpointError for a fact that is missing, contradictory or not supported.
    """
    is_canonical: bool
    """Whether keys and tensor names are z-lab's, so that writers keep them."""
    load: Callable[[Path], Weights] = read_weights
    """All tensors of the directory by the names they have there; raises CheckpointError."""
    canonical: Callable[[Weights, DraftSpec], Weights] = lambda weights, _: weights
    """Renames tensors to canonical names; an unknown one keeps its name and is later refused as unused."""
    refuse_unread: Callable[[Facts], None] = refuse_unread
    """Raises CheckpointError for a key that was not read and may be a fact; called when all facts are read."""


def renamed(weights: Weights, new_name: Callable[[str], str]) -> Weights:
    """The tensors by new names; raises CheckpointError where two would get the same one."""
    result: Weights = {}
    for name, tensor in weights.items():
        if (new := new_name(name)) in result:
            raise tensor.error(f"no other {new!r}", "one besides")
        result[new] = msgspec.structs.replace(tensor, name=new)
    return result


def refuse_unless(layout: str, spec: DraftSpec, plain: Mapping[str, object]) -> None:
    """Raises CheckpointError for the first fact of `spec` that is not as in `plain`."""
    for fact, expected in plain.items():
        if getattr(spec, fact) != expected:
            raise unrepresentable(layout, fact, repr(expected), getattr(spec, fact))


def unrepresentable(layout: str, fact: str, expected: str, found: object) -> CheckpointError:
    """The error for a fact that a layout cannot represent."""
    return CheckpointError(
        f"{fact}: expected {expected}, which is what the layout {layout} can represent, found {found}"
    )
