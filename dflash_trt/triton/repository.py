# SPDX-License-Identifier: Apache-2.0
"""Writes a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.errors import BuildError
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import OutputKind, new_directory
from dflash_trt.triton.model_config import config_text
from dflash_trt.triton.model_file import MODEL_FILE, TritonConfig, check_name, model_text

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
ENTRY = """\
# SPDX-License-Identifier: Apache-2.0
from dflash_trt.triton.model import TritonPythonModel as TritonPythonModel
"""


def _is_entry(file: Path) -> bool:
    try:
        return read_bytes(file, BuildError, limit=len(ENTRY)) == ENTRY.encode()
    except BuildError:
        return False


def is_repository(directory: Path) -> bool:
    """Whether a directory has nothing but one model of ours."""
    entries = list(directory.iterdir())
    files = (
        [entries[0] / name for name in (CONFIG_FILE, f"{VERSION}/model.py", f"{VERSION}/{MODEL_FILE}")]
        if entries
        else []
    )
    return len(entries) == 1 and all(file.is_file() for file in files) and _is_entry(files[1])


REPOSITORY = OutputKind(name="a repository that this command wrote", recognizes=is_repository, option="-o REPO")


def write_repository(
    output: Path, name: str, arguments: dict[str, Any], config: TritonConfig, *, force: bool = False
) -> None:
    """Writes `output` with the one model `name`, whose runtime is made with `arguments`.

    The same settings give the same bytes. Raises ConfigError for a name that is none, BuildError when `output`
    cannot be written; then nothing is left.
    """
    check_name(name)
    with new_directory(output, REPOSITORY, force=force) as directory:
        version = directory / name / VERSION
        version.mkdir(parents=True)
        (version.parent / CONFIG_FILE).write_text(config_text(name, decoupled=config.decoupled))
        (version / "model.py").write_text(ENTRY)
        (version / MODEL_FILE).write_text(model_text(arguments, config))
