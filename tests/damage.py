# SPDX-License-Identifier: Apache-2.0
"""Copies of draft checkpoints with a tensor changed: a drafter that is worse, for a known reason."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def copy_scaled(source: Path, output: Path, suffix: str, factor: float) -> None:
    """Writes `source` to `output`, its tensors whose names end in `suffix` multiplied by `factor`."""
    shutil.copytree(source, output, dirs_exist_ok=True)
    file = output / "model.safetensors"
    tensors = {name: tensor * factor if name.endswith(suffix) else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
