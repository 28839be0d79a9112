# SPDX-License-Identifier: Apache-2.0
"""An engine that replaces another keeps those of its plans that were made from the same bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from dflash_trt.engine.manifest import MANIFEST, Manifest, read_manifest
from dflash_trt.errors import EngineError


def carry_plans(old: Path, new: Path, manifest: Manifest) -> Manifest:
    """`manifest` of the engine at `new`, with the plans of the engine at `old`, if there is one, that still hold."""
    if not (old / MANIFEST).is_file():
        return manifest
    try:
        before = read_manifest(old)
    except EngineError:  # damaged, which is why it is replaced
        return manifest
    reusable = {name: plan for name, plan in before.plans.items() if plan.made_from.items() <= manifest.sha256.items()}
    for plan in reusable.values():
        link(old / plan.file, new / plan.file)
    hashes = manifest.sha256 | {plan.file: before.sha256[plan.file] for plan in reusable.values()}
    return msgspec.structs.replace(
        manifest,
        plans=reusable,
        plan_options=manifest.plan_options or before.plan_options,
        sha256=dict(sorted(hashes.items())),
    )


def link(file: str | Path, name: str | Path) -> str:
    """Gigabytes under a second name until the old directory is gone; copied where there are no links."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
    return str(name)
