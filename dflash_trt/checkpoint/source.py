# SPDX-License-Identifier: Apache-2.0
"""Resolves a checkpoint's name, a local directory or a Hugging Face repository id, to a directory."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.checkpoint.hub import fetch_configuration, fetch_weights, refuse_hub_cache
from dflash_trt.errors import CheckpointError

GGUF = ".gguf"
REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def checkpoint_directory(name: str) -> Path:
    """The local directory of a checkpoint, or its GGUF file; a repository is taken from the hub's cache or fetched.

    Raises CheckpointError when there is no such directory, or the repository is neither cached nor reachable.
    """
    directory = configuration_directory(name)
    fetch_weights(directory)
    return directory


def configuration_directory(name: str, revision: str | None = None) -> Path:
    """The local directory of a checkpoint; from a repository only facts and tokenizer are fetched, not the weights.

    With a `revision` (a commit), `name` is always a repository.
    """
    if revision is None and (path := _local_directory(name)):
        return path
    if name.startswith((".", "/", "~")) or not REPOSITORY_ID.fullmatch(name):
        raise CheckpointError(
            f"{name!r}: neither a checkpoint directory nor a Hugging Face repository id (owner/name)",
            hint="is its path right? Ids of drafts and targets: dflash-trt drafts",
        )
    return fetch_configuration(name, revision)


def checkpoint_label(name: str) -> str:
    """A repository id, or the last part of a directory's path: never a path of this machine."""
    path = _local_directory(name)
    return label_text(name if path is None else path.resolve().name)


def label_text(name: str) -> str:
    """`name` with "?" for what JSON cannot hold: file names need not be Unicode."""
    return name.encode(errors="replace").decode()


def is_local(name: str) -> bool:
    """Whether a checkpoint's name is a directory or GGUF file of this machine."""
    return _local_directory(name) is not None


def _local_directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if not name or not path.exists():
            return None
        if path.is_dir():
            return _by_content(path)
    except RuntimeError:  # ~NAME of an unknown user
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: expected a checkpoint directory, found: {error.strerror}") from None
    if path.suffix == GGUF:
        return path
    raise CheckpointError(f"{name}: expected a checkpoint directory or a GGUF file, found another file")


def _by_content(directory: Path) -> Path:
    """The directory, or its GGUF file where it holds one and no config.json.

    Raises CheckpointError for a directory without config.json that holds something else.
    """
    if (directory / "config.json").exists():
        return directory
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory}: expected a draft or a target, found a LoRA adapter (adapter_config.json)",
            hint="merge it into its model first (peft: merge_and_unload), and give that",
        )
    refuse_hub_cache(directory)
    files = sorted(directory.glob(f"*{GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{directory}: expected one GGUF file, found {names}", hint="name the file that you mean")
    return files[0] if files else directory
