# SPDX-License-Identifier: Apache-2.0
"""The state of an unfinished training, in a file beside the output, from which it continues."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from dflash_trt.checkpoint.safetensors_file import Expected, check_tensors, read_tensors
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter, metadata
from dflash_trt.errors import CheckpointError
from dflash_trt.files.json_file import json_value
from dflash_trt.files.write import OutputKind, new_file

METADATA_KEY = "dflash_trt_recovery"
PARTS = ("master", "exp_avg", "exp_avg_sq")
STATE = OutputKind(
    name="the state of an unfinished recovery", recognizes=lambda file: METADATA_KEY in metadata(file), form="file"
)
Tensors = dict[str, torch.Tensor]


class Progress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Progress and losses of a training."""

    identity: str
    """sha256 of all that decides the result."""
    step: int = 0
    """Steps done."""
    losses: list[float] = msgspec.field(default_factory=list)
    """Training loss by step."""
    held_out: list[tuple[int, float]] = msgspec.field(default_factory=list)
    """(steps done, loss on the sequences kept apart), quantised."""
    dense_held_out: float = 0
    """Held-out loss of the draft as it was given, not quantised."""


def state_file(output: Path) -> Path:
    """File with the state of an unfinished recovery to `output`."""
    return output.parent / f"{output.name}.recovery.safetensors"


def save_state(file: Path, progress: Progress, tensors: Tensors) -> None:
    """Replaces the state; raises BuildError when it cannot be written."""
    note = {METADATA_KEY: msgspec.json.encode(progress).decode()}
    with new_file(file, STATE, force=True) as new:
        layout = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
        with SafetensorsWriter(new, layout, metadata=note) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor.cpu().numpy())


def load_state(file: Path, identity: str, shapes: dict[str, tuple[int, ...]]) -> tuple[Progress, Tensors] | None:
    """The state in `file`, None where there is none; CheckpointError for a damaged one or one of something else."""
    if not file.exists():
        return None
    headers = read_tensors(file)
    hint = f"to start anew, delete {file.name}"
    content = metadata(file).get(METADATA_KEY, "").encode()
    progress = json_value(
        content, f"{file}: metadata {METADATA_KEY}", Progress, CheckpointError, what="state", hint=hint
    )
    if progress.identity != identity:
        raise CheckpointError(
            f"{file} is the state of another recovery: draft, recipe, features or options differ",
            hint=f"give the same arguments again, or {hint}",
        )
    expected: Expected = {f"{part}/{module}": (("F32",), shape) for part in PARTS for module, shape in shapes.items()}
    check_tensors(file, expected, headers, described_by="this draft", hint=hint)
    with safe_open(file, framework="pt") as handle:
        return progress, {name: handle.get_tensor(name) for name in expected}
