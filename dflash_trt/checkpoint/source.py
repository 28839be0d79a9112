# SPDX-License-Identifier: Apache-2.0
"""Turns what the user named, a local directory or a Hugging Face repository id, into a directory."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.errors import CheckpointError

REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything but weights that are pickles, other frameworks' weights and media.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def checkpoint_directory(name: str) -> Path:
    """The local directory of a checkpoint; a repository id is taken from huggingface_hub's cache or fetched.

    Raises CheckpointError when there is no such directory, or when the repository is neither cached nor
    reachable.
    """
    if path := _local_directory(name):
        return path
    if name.startswith((".", "/", "~")) or not REPOSITORY_ID.fullmatch(name):
        raise CheckpointError(
            f"{name!r}: expected a checkpoint directory or a Hugging Face repository id (owner/name), found neither"
        )
    return _download(name)


def checkpoint_label(name: str) -> str:
    """A repository id as it is, a directory by its name alone: never a path of this machine."""
    path = _local_directory(name)
    label = name if path is None else path.resolve().name
    return label.encode(errors="replace").decode()  # file names need not be Unicode, JSON must be


def _local_directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if not name or not path.exists():
            return None
        if path.is_dir():
            return path
    except RuntimeError:  # ~NAME without such a user
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: expected a checkpoint directory, found: {error.strerror}") from None
    raise CheckpointError(f"{name}: expected a checkpoint directory, found a file")


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, allow_patterns=PATTERNS))
    except HFValidationError as error:
        raise CheckpointError(
            f"{repository}: expected a local directory or a Hugging Face repository id, found neither ({error})"
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"{repository}: expected access to the repository, found that it is gated",
            hint=f"accept its licence at https://huggingface.co/{repository}, then: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repository}: expected a local directory or a Hugging Face repository, found neither",
            hint="check the spelling; for a private repository: hf auth login",
        ) from None
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise CheckpointError(
            f"{repository}: expected it in the Hugging Face cache or a reachable hub, found neither"
            f" ({type(error).__name__})",
            hint=f"on a machine with network: hf download {repository}",
        ) from None
