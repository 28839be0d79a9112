# SPDX-License-Identifier: Apache-2.0
"""Predictions that were held against published measurements, and the marks of those that were not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.files.json_file import package_data
from dflash_trt.observe.estimate.constants import DATA
from dflash_trt.observe.estimate.shapes import METHODS, Method, System
from dflash_trt.observe.plots.method_styles import TITLES

AIM = 0.25
NOT_VALIDATED = " (not validated)"
OF_THE_KIND = {"delta nets, state": "delta nets", "latent projections": "latent attention"}
"""Terms of a step that only one kind of target has."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published speeds, or ratios, of one kind of target on one GPU by one method."""

    kind: str
    gpu: str
    method: Method
    within: int
    """Number within AIM of the prediction."""
    of: int


def kind_of(target: TargetShape) -> str:
    """Kinds of a target's layers: attention and MLPs."""
    mlps = "experts" if target.num_experts else "dense"
    if target.latent is not None:
        return f"latent attention, {mlps}"
    return f"delta nets, {mlps}" if target.num_linear_layers else mlps


@cache
def held_out() -> tuple[HeldOut, ...]:
    return package_data(DATA / "held_out.json", tuple[HeldOut, ...])


def of_system(system: System) -> list[HeldOut]:
    """Counts for the system's kind of target on its GPU; no server with our plans of a drafter has been measured."""
    like = [each for each in held_out() if (each.kind, each.gpu) == (kind_of(system.target), system.gpu.name)]
    return [each for each in like if each.method != "dflash" or not _has_plans(system)]


def _has_plans(system: System) -> bool:
    return system.draft is not None and system.draft.has_our_kernel


def summary(system: System) -> str:
    """Accuracy of predictions: overall, and for this kind of target on this GPU."""
    known = {each.method: each for each in of_system(system)}
    shown = ", ".join(f"{TITLES[m]} {known[m].within} of {known[m].of}" for m in METHODS if m in known)
    like = f"like this ({kind_of(system.target)}; {system.gpu.name})"
    own = f"{like}: {shown}" if shown else f"none was {like}, so what follows is not validated"
    if shown and _has_plans(system):
        own += ", none with the drafter in TensorRT plans"
    return f"{_sum(held_out())} published speeds that were held out lay within {AIM:.0%}; {own}"


def _sum(counts: Sequence[HeldOut]) -> str:
    return f"{sum(each.within for each in counts)} of {sum(each.of for each in counts)}"


def is_validated(system: System, method: Method) -> bool:
    """Whether published speeds were compared for this method, kind of target and GPU."""
    return any(each.method == method for each in of_system(system))


def mark(system: System, part: str, term: str) -> str:
    """Suffix that marks an unvalidated term."""
    if part == "drafter" and _has_plans(system):
        return NOT_VALIDATED
    layers = OF_THE_KIND.get(term)
    if layers and not any(each.kind.startswith(layers) for each in held_out()):
        return NOT_VALIDATED
    return ""
