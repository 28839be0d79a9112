# SPDX-License-Identifier: Apache-2.0
"""Writes a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.errors import BuildError
from dflash_trt.files.write import new_directory
from dflash_trt.triton.model_config import config_text
from dflash_trt.triton.model_file import MODEL_FILE, TritonConfig, model_text

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
ENTRY = """\
# SPDX-License-Identifier: Apache-2.0
from dflash_trt.triton.model import TritonPythonModel as TritonPythonModel
"""


def write_repository(
    output: Path, name: str, arguments: dict[str, Any], config: TritonConfig, *, force: bool = False
) -> None:
    """Writes `output` with the one model `name`, whose runtime is made with `arguments`.

    The same settings give the same bytes. Raises BuildError when `output` cannot be written; then nothing is left.
    """
    _check_replaceable(output)
    with new_directory(output, force=force) as directory:
        version = directory / name / VERSION
        version.mkdir(parents=True)
        (version.parent / CONFIG_FILE).write_text(config_text(name, decoupled=config.decoupled))
        (version / "model.py").write_text(ENTRY)
        (version / MODEL_FILE).write_text(model_text(arguments, config))


def _check_replaceable(output: Path) -> None:
    """--force replaces a repository that has nothing but one model of ours."""
    if output.is_dir() and (entries := list(output.iterdir())):
        is_ours = len(entries) == 1 and (entries[0] / VERSION / MODEL_FILE).is_file()
        if not is_ours:
            raise BuildError(
                f"{output}: expected a repository that this command wrote, or none, found another directory",
                hint="choose another -o REPO",
            )
