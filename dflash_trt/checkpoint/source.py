# SPDX-License-Identifier: Apache-2.0
"""Turns what the user named, a local directory or a Hugging Face repository id, into a directory."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.checkpoint.hub import fetch_configuration, fetch_weights
from dflash_trt.errors import CheckpointError

GGUF = ".gguf"
GGUF_HINT = (
    "llama.cpp serves it (--spec-type draft-dflash -md FILE); give dflash-trt the safetensors that it was made from"
)
REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def checkpoint_directory(name: str) -> Path:
    """The local directory of a checkpoint; a repository is taken from huggingface_hub's cache or fetched.

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
        raise CheckpointError(f"{name!r}: neither a checkpoint directory nor a Hugging Face repository id (owner/name)")
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
            _refuse_by_content(path)
            return path
    except RuntimeError:  # ~NAME without such a user
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: expected a checkpoint directory, found: {error.strerror}") from None
    raise CheckpointError(
        f"{name}: expected a checkpoint directory, found a {'GGUF file' if name.endswith(GGUF) else 'file'}",
        hint=GGUF_HINT if name.endswith(GGUF) else None,
    )


def _refuse_by_content(directory: Path) -> None:
    """Raises CheckpointError for a directory without config.json that holds something else."""
    if (directory / "config.json").exists():
        return
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory}: expected a draft or a target, found a LoRA adapter (adapter_config.json)",
            hint="merge it into its model first (peft: merge_and_unload), and give that",
        )
    if files := sorted(path.name for path in directory.glob(f"*{GGUF}")):
        raise CheckpointError(f"{directory}: expected safetensors files, found GGUF ({files[0]})", hint=GGUF_HINT)
