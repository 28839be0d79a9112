# SPDX-License-Identifier: Apache-2.0
"""Captures feature files for tests."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_trt.runtime.measure.features import CHECKSUM, METADATA_KEY, checksum
from tests.cli.commands import run_here
from tests.paths import FIXTURES

Tensors = dict[str, torch.Tensor]
Facts = dict[str, object]


def capture(name: str, output: Path, *options: object) -> Path:
    """`dflash-trt capture` on a fixture pair."""
    prompts = () if "--prompts" in options else ("--prompts", FIXTURES / "prompts.jsonl")
    draft, target = FIXTURES / f"{name}-dflash", FIXTURES / name
    run_here("capture", draft, "--target", target, *prompts, "-o", output, *options)
    return output


def read(file: Path) -> tuple[Tensors, Facts]:
    """All tensors but the checksums, and the facts, through the safetensors library."""
    with safe_open(file, framework="pt") as handle:
        facts: Facts = json.loads(handle.metadata()[METADATA_KEY])
    return {name: tensor for name, tensor in load_file(file).items() if not name.startswith(CHECKSUM)}, facts


def edit(file: Path, output: Path, change: Callable[[Tensors, Facts], object]) -> Path:
    """A copy of a feature file whose tensors and facts `change` has altered, with checksums of what it then holds."""
    tensors, facts = read(file)
    change(tensors, facts)
    checksums = {f"{CHECKSUM}{name}": torch.tensor(checksum(tensor)) for name, tensor in tensors.items()}
    save_file(tensors | checksums, output, {METADATA_KEY: json.dumps(facts)})
    return output


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process end at a thousand bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
