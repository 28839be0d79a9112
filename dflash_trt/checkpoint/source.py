# SPDX-License-Identifier: Apache-2.0
"""Turns what the user named, a local directory or a Hugging Face repository id, into a directory."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.checkpoint.hub import fetch_configuration, fetch_weights
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
    """The local directory of a checkpoint; of a repository only facts and tokenizer are fetched, not the weights.

    With a `revision`, a commit, `name` is a repository.
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
    """A repository id as it is, a directory by its name alone: never a path of this machine."""
    path = _local_directory(name)
    return label_text(name if path is None else path.resolve().name)


def label_text(name: str) -> str:
    """`name` as JSON can hold it: file names need not be Unicode."""
    return name.encode(errors="replace").decode()


def is_local(name: str) -> bool:
    """Whether a checkpoint's name is that of a directory here."""
    return _local_directory(name) is not None


def _local_directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if not name or not path.exists():
            return None
        if path.is_dir():
            return _by_content(path)
    except RuntimeError:  # ~NAME without such a user
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
    files = sorted(directory.glob(f"*{GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{directory}: expected one GGUF file, found {names}", hint="name the file that you mean")
    return files[0] if files else directory
